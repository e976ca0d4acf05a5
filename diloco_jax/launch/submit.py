"""Act on a deployment: look for its resources, ask, and run one command after another.

A backend renders plain values; here they are carried out. The cloud itself says what
there is, so every action may be interrupted and repeated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console

from diloco_jax.observability.terminal import bar

SHARED = ""
"""Owner of resources that belong to no island."""
CONTENT = "diloco-content"
"""Label with the digest of a resource's content."""
NO_JOBS = "No in-progress managed jobs"
"""Answer of `sky jobs queue` as long as nobody has launched any."""
NOT_FOUND = re.compile(r"not[ _]found", re.IGNORECASE)
CAPACITY = re.compile(
    r"quota|RESOURCE_EXHAUSTED|STOCKOUT|capacity|insufficient|not available in"
    r"|not supported|accelerator type .* not found|zone .* not found"
    # The cloud's message for a zone that has no TPUs at all.
    r"|Permission denied on 'locations",
    re.IGNORECASE,
)
REMEDIES = {
    r"SERVICE_DISABLED|has not been used in project|is not enabled": (
        "enable the service that the message names: `gcloud services enable SERVICE`"
    ),
    r"PERMISSION_DENIED|Required '.*' permission|Forbidden|does not have .* access": (
        "ask for the role that the message names; docs/tpu.md lists those needed"
    ),
    r"Reauthentication|gcloud auth login|Unauthorized|must be logged in": (
        "log in: `gcloud auth login`; kubectl also needs `gcloud components install "
        "gke-gcloud-auth-plugin`"
    ),
    r"matches for kind \"JobSet\"|resource type \"jobset\"": (
        "install JobSet in the cluster; docs/gke.md says how"
    ),
}
INSTALL = {
    "gcloud": "install the Google Cloud CLI (https://cloud.google.com/sdk)",
    "sky": "install it with `pip install 'skypilot[gcp]'`, and see `sky check gcp`",
    "diloco": "install this package, and put its `diloco` on PATH",
    "kubectl": "install it with `gcloud components install kubectl`",
}


class CommandError(Exception):
    """A command failed: names it, its exit code, its output and the remedy."""


@dataclasses.dataclass(frozen=True)
class Command:
    """One command line and its deadline."""

    arguments: tuple[str, ...]
    deadline_s: float = 120.0
    remedy: str = ""
    """Advice if the command fails for want of capacity."""
    deletes: bool = False
    """True if what it deletes may be gone already."""

    @property
    def line(self) -> str:
        """The command as people type it."""
        return shlex.join(self.arguments)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resource:
    """One thing in the cloud, with the commands that find, make and delete it."""

    what: str
    """Description for people, such as "slice mixed-v5p in us-east5-a"."""
    owner: str
    """Name of the island that it is for, "coordinator", or SHARED."""
    find: Command
    """Command that prints the state. It fails with "not found", or prints nothing, if
    the resource does not exist."""
    create: tuple[Command, ...]
    delete: Command | None
    """Command that deletes it; None = it stays, since others may use it."""
    dead: tuple[str, ...] = ()
    """States in which it is useless and must be made anew."""
    content: str = ""
    """Word of the state once it has what it is to have; empty = it always has."""
    update: tuple[Command, ...] = ()
    """Commands that give it its content if it is there without."""
    job: str = ""
    """Name of the job whose state is in the JSON that `find` prints. Once it is dead,
    nothing is left of it to delete."""
    runs: bool = False
    """True for a process rather than a machine: stopping a launch deletes it."""
    keeps: bool = False
    """True if it holds the run, or its beginning: it is deleted only on demand."""
    logs: Command | None = None
    """Command that prints the last lines of its processes, if it has any."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """Everything that one backend renders of a launch."""

    files: dict[str, str]
    """Texts by name, for the launch's folder, without secrets."""
    resources: tuple[Resource, ...]
    """Resources in the order in which they are made."""
    prepare: tuple[Command, ...] = ()
    """Commands to run before all others; they change nothing in the cloud."""
    status: Command | None = None
    """Command that prints what `diloco status --json` does."""
    results: tuple[Command, ...] = ()
    """Commands that copy the run's folder to `results` beside the launch's folder."""


class Submitter:
    """One action on a deployment.

    only: owners that the action is limited to; empty = all. show: prints a line.
    confirm: asks the user whether to go on. dry_run: show the command lines and run
    nothing, as if nothing existed yet. until: time of the monotonic clock after which
    no command that changes anything begins or goes on.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        only: tuple[str, ...],
        show: Callable[[str], None],
        confirm: Callable[[str], bool],
        dry_run: bool = False,
        until: float = math.inf,
    ) -> None:
        self.deployment, self._only = deployment, only
        self._show, self._confirm, self._dry_run = show, confirm, dry_run
        self._until = until

    def create(self) -> None:
        """Make every resource that is missing, and make useless ones anew."""
        self._make(self.deployment.resources)

    def run(self) -> None:
        """Start the processes again on the existing machines."""
        self._make(r for r in self.deployment.resources if r.runs or r.content)

    def stop(self) -> None:
        """End the processes: islands say goodbye, the coordinator sums up. Machines
        stay."""
        self._prepare()
        self._carry_out(_deletions(r for r in self._resources() if r.runs))

    def delete(self, *, disk: bool) -> None:
        """Delete everything; keep the disk that holds the run unless `disk`."""
        self._prepare()
        kept = [r for r in self._resources() if r.keeps and not disk]
        self._carry_out(_deletions(r for r in self._resources() if r not in kept))
        for resource in kept:
            self._show(f"# kept: {resource.what}; it belongs to the run (--disk)")

    def deletions(self) -> list[str]:
        """Return the lines that delete everything."""
        return [command.line for command in _deletions(self.deployment.resources)]

    def left(self) -> list[str]:
        """Return what there is of the launch, each with its state, by asking the cloud
        for every part that a launch deletes. Raises CommandError if it does not
        answer."""
        self._prepare()
        states = {r.what: _state_of(r) for r in self._resources() if r.delete}
        return [f"{what}: {state}" for what, state in states.items() if state]

    def logs(self) -> None:
        """Print the last lines of every process."""
        self._show_outputs([r.logs for r in self._resources() if r.logs])

    def results(self) -> None:
        """Copy the run's folder to this machine."""
        if not self.deployment.results:
            raise CommandError(
                "SkyPilot does not show the machines of its managed jobs; the run is "
                "on the coordinator's disk, which any machine in its zone can mount, "
                "and snapshots are in placement.checkpoints, if that is a bucket"
            )
        self._show_outputs(self.deployment.results)

    def status(self) -> dict[str, Any]:
        """Return what `diloco status --json` prints; empty in a dry run."""
        self._prepare()
        command = self.deployment.status
        assert command is not None
        self._show(command.line)
        if self._dry_run:
            return {}
        text = _call(command)
        try:
            status: dict[str, Any] = json.loads(text)
            status["phase"]
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{text.strip()!r} is no status ({error!r})") from error
        return status

    def _make(self, resources: Iterable[Resource]) -> None:
        """Make what is missing. The files that processes read must be right, whichever
        owners are chosen."""
        self._prepare()
        chosen, commands = self._resources(), list[Command]()
        for resource in resources:
            if (resource.content and not resource.keeps) or resource in chosen:
                commands += self._commands_for(resource)
        self._carry_out(commands)

    def _commands_for(self, resource: Resource) -> Iterable[Command]:
        """Return the commands that put a resource right."""
        state = "" if self._dry_run else _state_of(resource)
        words = state.split()
        if not state:
            return resource.create
        self._show(f"# there: {resource.what}: {state}")
        if set(words) & set(resource.dead):
            return (*_deletions([resource]), *resource.create)
        right = not resource.content or resource.content in words
        return () if right else resource.update

    def _resources(self) -> list[Resource]:
        every = self.deployment.resources
        return [r for r in every if not self._only or r.owner in self._only]

    def _show_outputs(self, commands: Iterable[Command]) -> None:
        self._prepare()
        for command in commands:
            self._show(command.line)
            if not self._dry_run:
                self._show(_call(command).rstrip())

    def _prepare(self) -> None:
        for command in self.deployment.prepare:
            self._show(command.line)
            if not self._dry_run:
                _call(command)

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            self._show(command.line)
        if self._dry_run or not commands:
            return
        if not self._confirm(f"run these {len(commands)} commands?"):
            return
        with bar(Console(stderr=True), f"{len(commands)} commands") as report:
            for done, command in enumerate(commands, start=1):
                self._show(f"$ {command.line}")
                left_s = self._until - time.monotonic()
                if left_s <= 0:
                    raise CommandError(f"{command.line}\nwas not begun: time is over")
                deadline_s = min(command.deadline_s, left_s)
                command = dataclasses.replace(command, deadline_s=deadline_s)
                if said := _call(command).rstrip():
                    self._show(said)
                report(done / len(commands))


def _deletions(resources: Iterable[Resource]) -> list[Command]:
    """Return the commands that delete these, newest first."""
    return [r.delete for r in reversed(list(resources)) if r.delete]


# ---- calls of the cloud's tools -----------------------------------------------------


def _attempt(command: Command) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its result even if it failed.

    Raises CommandError if the program is missing or the deadline passes.
    """
    program = command.arguments[0]
    try:
        return subprocess.run(
            command.arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=command.deadline_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise CommandError(
            f"{program} is not on this machine; {INSTALL[program]}"
        ) from error
    except OSError as error:  # No memory or no process left, say.
        raise CommandError(f"{program} could not be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(
            f"{command.line}\ndid not end within {command.deadline_s:g} s; it may go "
            f"on in the cloud: run the same `diloco launch` again, it takes up what is "
            f"there"
        ) from error


def _call(command: Command) -> str:
    """Run a command and return its output; raise CommandError if it fails, unless what
    it deletes is gone."""
    done = _attempt(command)
    if done.returncode and not (command.deletes and NOT_FOUND.search(done.stderr)):
        raise _failure(command, done)
    return done.stdout


def _failure(command: Command, done: subprocess.CompletedProcess[str]) -> CommandError:
    """Return the error for a command that failed."""
    said = done.stderr.strip() or done.stdout.strip() or "(it said nothing)"
    remedy = "put that right and run the same `diloco launch` again"
    known = [text for pattern, text in REMEDIES.items() if re.search(pattern, said)]
    if command.remedy and CAPACITY.search(said):
        remedy = command.remedy
    elif known:
        remedy = known[0]
    return CommandError(
        f"{command.line}\nexit code {done.returncode}: {said}\n{remedy}"
    )


def _state_of(resource: Resource) -> str:
    """Return the state in words, on one line; empty if the resource is missing. Raises
    CommandError if it cannot be looked at."""
    done = _attempt(resource.find)
    if resource.job and NO_JOBS in done.stdout + done.stderr:
        return ""
    if done.returncode:
        if NOT_FOUND.search(done.stderr):
            return ""
        raise _failure(resource.find, done)
    if resource.job:
        return _state_of_job(done.stdout, resource)
    return " ".join(done.stdout.split())


def _state_of_job(text: str, resource: Resource) -> str:
    """Return the state of the newest job of that name; empty if it is dead."""
    begins = re.search(r"^\[", text, re.MULTILINE)  # After what else it says.
    if begins is None:
        raise CommandError(f"`sky jobs queue` printed no list of jobs: {text!r}")
    try:
        queue = json.loads(text[begins.start() :])
        jobs = [job for job in queue if job["job_name"] == resource.job]
        newest = max(jobs, key=lambda job: job["job_id"], default={"status": ""})
        state = str(newest["status"])
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"`sky jobs queue` printed a list that is not understood ({error!r}): "
            f"{text!r}"
        ) from error
    return "" if state in resource.dead else state
