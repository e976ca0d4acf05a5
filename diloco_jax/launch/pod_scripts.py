"""The shell lines that the pods of a launch run around `diloco`."""

from __future__ import annotations

from diloco_jax import run_files
from diloco_jax.launch.order import LASTED_S, PERMIT, WORKDIR

LASTED_CODE = 4
"""Exit code of a pod whose process crashed after lasting progress. `diloco` has no such
code: Kubernetes keeps no files of a pod that ended, so the code tells it."""
PERMIT_FILE = f"{WORKDIR}/{PERMIT}"

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
