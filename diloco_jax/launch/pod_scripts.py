"""The shell lines that the pods of a launch run around `diloco`."""

from __future__ import annotations

from diloco_jax import run_files
from diloco_jax.launch.order import LASTED_S, PERMIT, WORKDIR

BEGINS_S = 1800
"""Seconds for which a standby on a new disk waits for the coordinator's first answer.
Until the run has begun there is nothing to follow."""
LASTED_CODE = 4
"""Exit code of a pod whose process crashed after lasting progress. `diloco` has no such
code: Kubernetes keeps no files of a pod that ended, so the code tells it."""
PERMIT_FILE, NODE_FILE = f"{WORKDIR}/{PERMIT}", f"{WORKDIR}/{run_files.NODE}"

ISLAND_LASTED = f"[ -e {WORKDIR}/{run_files.LASTED} ]"
"""Tells whether the island made steps for `LASTED_S`; its folder is as old as its pod.
"""
WORKER_LASTED = f'[ "$SECONDS" -ge {LASTED_S} ]'
"""The same of a worker, which copies no text first: it ran for so long."""
COORDINATOR_LASTED = (
    f'{WORKER_LASTED} && [ -n "$(find {WORKDIR}/{run_files.PUBLISHES} '
    f'-newermt "@$began" -print -quit 2>/dev/null)" ]'
)
"""The same of a coordinator: it ran for so long, and merged."""

ALONE = f"""\
if [ -e {NODE_FILE} ]; then
  echo "launch.standby_zone is empty, and this run has had a standby, which may have"
  echo "led last: set it again. If this coordinator led last, remove {NODE_FILE}"
  exit 2
fi
"""
"""Lines that keep a coordinator from going on from a log that may be the older one."""
FOLLOWS_NEXT = f"""\
# Another node leads the run that is here: the next start follows it.
if [ "$code" = 3 ] && [ "$1" != --standby-of ] && [ -d {WORKDIR}/log ]; then code=1; fi
"""
NOT_COMPLETE = """\
if [ "$asked" ] && [ "$code" = 0 ]; then code=1; fi
"""
"""Lines that end with 1 instead of 0 if the pod was asked to end, as where its node is
drained: the Job would count as complete, which says that the run is over."""


def ended_at(command: str, end_unix: int, grace_s: float) -> str:
    """Return shell lines that become the command, ended by SIGTERM at `end_unix` (0 =
    never), and by SIGKILL `grace_s` later. Started after that, they end with 0."""
    if not end_unix:
        return f"exec {command}\n"
    return (
        f"left=$(({end_unix} - $(date +%s)))\n"
        f"if [ $left -le 0 ]; then echo 'launch.max_hours are over'; exit 0; fi\n"
        f"exec timeout --foreground --kill-after={grace_s:g} $left {command}\n"
    )


def unless_it_began(standby: str) -> str:
    """Return shell lines by which a coordinator follows its standby at HOST:PORT: it
    leads at once from its own log if the mandate still names it. A run that has had no
    mandate yet has nobody to follow."""
    return f"""\
if [ ! -d {WORKDIR}/log ] || [ -e {NODE_FILE} ]; then
  set -- --standby-of {standby}
fi
"""


def after_begin(lead: str) -> str:
    """Return shell lines that wait until the coordinator at HOST:PORT has answered
    once; not on a disk on which a standby has been."""
    return f"""\
lead={lead} until=$(($(date +%s) + {BEGINS_S}))
while [ ! -e {NODE_FILE} ] && [ "$(date +%s)" -lt $until ]; do
  if timeout 5 bash -c "exec 3<>/dev/tcp/${{lead%:*}}/${{lead##*:}}" 2>/dev/null; then
    break
  fi
  sleep 5
done
"""


def told_apart(start: str, lasted: str, most: int, last: str = "") -> str:
    """Return shell lines that run these and end as they do, but with `LASTED_CODE` in
    the place of a crash after lasting progress, so that Kubernetes counts the others.

    lasted: condition that tells of that progress. most: starts without it after which
    Kubernetes gives the process up. last: lines that may change the code before.
    """
    return f"""\
began=$EPOCHSECONDS
serve() {{
{start}}}
asked= child=
ask() {{ if [ "$child" ]; then kill -TERM "$child" 2>/dev/null || true; fi; }}
trap 'asked=yes; ask' TERM
serve "$@" &
child=$!
# It may have been asked before its number was known.
if [ "$asked" ]; then ask; fi
code=0
wait "$child" || code=$?
while [ "$asked" ] && kill -0 "$child" 2>/dev/null; do wait "$child" || true; done
if [ "$asked" ]; then
  code=0
  wait "$child" || code=$?
fi
{last}case "$code" in
  0 | 2 | 3) ;;
  *)
    if {lasted}; then
      code={LASTED_CODE}
    elif [ ! "$asked" ]; then
      echo "ended with exit code $code before {LASTED_S} s of progress; after {most}" \\
        "such starts its machines are given back (placement.fruitless_starts)" >&2
    fi
    ;;
esac
exit "$code"
"""
