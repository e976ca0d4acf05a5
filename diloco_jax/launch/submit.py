"""Act on a deployment: look for its resources, ask, and run one command after another.

A resource is recorded before it is made, with the command that deletes it, so every
action may be interrupted and repeated.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

from rich.console import Console

from diloco_jax.launch.calls import CommandError, attempt, call, failure
from diloco_jax.launch.record import LaunchRecord
from diloco_jax.launch.resources import Command, Deployment, Owned, Resource
from diloco_jax.observability.bar import bar


class _HasOwner(Protocol):
    @property
    def owner(self) -> str: ...


NO_JOBS = "No in-progress managed jobs"
"""Answer of `sky jobs queue` as long as nobody has launched any."""

Item = TypeVar("Item", bound=_HasOwner)


class LaunchStep(NamedTuple):
    """A command that changes something."""

    command: Command
    makes: Resource | None = None
    deletes: str = ""
    """Resource that the command deletes; it may be gone already."""


class Submitter:
    """One action on a deployment, or several.

    only: owners that the action is limited to; empty = all. show: prints a line.
    confirm: asks the user whether to go on. dry_run: show the command lines and run
    nothing, as if only the recorded resources existed.
    """

    def __init__(
        self,
        deployment: Deployment,
        record: LaunchRecord,
        *,
        only: tuple[str, ...],
        show: Callable[[str], None],
        confirm: Callable[[str], bool],
        dry_run: bool = False,
    ) -> None:
        self._deployment, self._record = deployment, record
        self._only, self._show, self._confirm = only, show, confirm
        self._dry_run = dry_run

    def create(self) -> None:
        """Make every resource that is missing, and make useless ones anew."""
        self._prepare()
        known = {resource.what for resource in self._deployment.resources}
        for entry in self._record.made:
            if entry["what"] not in known:
                by_hand = shlex.join(entry["delete"])
                self._show(
                    f"# left over: {entry['what']}, which this config does not make; "
                    f"it stays until {by_hand}"
                )
        self._carry_out(self._missing(self._deployment.resources))

    def run(self) -> None:
        """Start the processes again on the existing machines."""
        self._prepare()
        processes = [r for r in self._deployment.resources if r.runs or r.content]
        self._carry_out(
            [*self._missing(processes), *self._steps(self._deployment.start)]
        )

    def logs(self) -> None:
        """Print the last lines of every process."""
        self._show_outputs([o.command for o in self._chosen(self._deployment.logs)])

    def status(self) -> dict[str, Any]:
        """Return what `diloco status --json` prints on the coordinator's machine; empty
        in a dry run."""
        self._prepare()
        self._show(shlex.join(self._deployment.status.arguments))
        if self._dry_run:
            return {}
        return _status_of(call(self._deployment.status))

    def results(self) -> None:
        """Copy the run's folder to this machine."""
        if not self._deployment.results:
            raise CommandError(
                "SkyPilot does not show the machines of its managed jobs; the run is "
                "on the coordinator's disk, which any machine in its zone can mount, "
                "and snapshots are in placement.checkpoints, if that is a bucket"
            )
        self._show_outputs(list(self._deployment.results))

    def watch(
        self, every_s: float, until: float, renew: Callable[[], Deployment]
    ) -> None:
        """Make anew what was taken away, until the run is done or `until` (of
        `time.time()`); then delete all but the run. A failure is shown and tried
        again.

        renew: renders the deployment anew, since a slice that is made anew begins above
        all incarnations before it.
        """
        self._prepare()
        while not self._over(until):
            try:
                self._deployment = renew()
                resources = [r for r in self._deployment.resources if r.revives]
                self._carry_out(self._missing(resources, taken=True))
            except CommandError as error:
                self._show(f"error: {error}")
            if self._dry_run:
                return
            time.sleep(every_s)
        self.delete(disk=False)

    def _over(self, until: float) -> bool:
        """Tell whether the run is done, as its coordinator says or what is left of it
        shows, or has no time left."""
        if self._dry_run:
            return False
        phase = "no answer"
        with contextlib.suppress(CommandError):
            phase = _status_of(call(self._deployment.status))["phase"]
        self._show(f"# {time.strftime('%H:%M')} {phase}")
        return time.time() >= until or phase == "done" or self._has_ended()

    def _has_ended(self) -> bool:
        for resource in self._deployment.resources:
            state = self._state(resource).split() if resource.ended else ["there"]
            if not set(state or [""]).isdisjoint(resource.ended):
                return True
        return False

    def stop(self) -> None:
        """End the processes: islands say goodbye, the coordinator sums up. Machines
        stay."""
        self._prepare()
        processes = [entry for entry in self._recorded() if entry["runs"]]
        self._carry_out([*_deletions(processes), *self._steps(self._deployment.stop)])

    def delete(self, *, disk: bool) -> None:
        """Delete everything; keep the disk that holds the run unless `disk`."""
        self._prepare()
        entries = self._recorded()
        self._carry_out(_deletions([e for e in entries if disk or not e["keeps"]]))
        for entry in entries:
            if entry["keeps"] and not disk:
                self._show(f"# kept: {entry['what']}; it holds the run (--disk)")

    # ---- what there is to do ----------------------------------------------------

    def _missing(
        self, resources: Iterable[Resource], *, taken: bool = False
    ) -> list[LaunchStep]:
        """Return the steps that make what is missing. taken: only what is dead, since
        what is not there was given back."""
        steps = []
        for resource in resources:
            # The files that processes read must be right, whichever owners are chosen.
            if not (resource.content or self._chosen([resource])):
                continue
            state = self._state(resource)
            if state:
                self._show(f"# there: {resource.what}: {state}")
            if state and not set(state.split()) & set(resource.dead):
                known = self._record.content(resource.what)
                self._record.add(resource, known)
                if resource.content != known:
                    *first, last = *resource.grant, *resource.update
                    steps += [LaunchStep(command) for command in first]
                    steps.append(LaunchStep(last, makes=resource))
                continue
            if taken and not state:
                continue
            if state and resource.delete is not None:
                steps.append(LaunchStep(resource.delete, deletes=resource.what))
            steps.append(LaunchStep(resource.create, makes=resource))
            steps += [LaunchStep(command) for command in resource.grant]
        return steps

    def _state(self, resource: Resource) -> str:
        """Return the state in words, on one line; empty if the resource is missing."""
        if self._dry_run:
            return ""
        result = attempt(resource.find)
        if resource.job and NO_JOBS in result.output + result.errors:
            return ""
        if result.code and not result.not_found:
            raise failure(resource.find, result)
        if resource.job and not result.code:
            return _state_of_job(result.output, resource)
        return "" if result.code else " ".join(result.output.split())

    def _recorded(self) -> list[dict[str, Any]]:
        only = self._only
        return [e for e in self._record.made if not only or e["owner"] in only]

    def _chosen(self, items: Iterable[Item]) -> list[Item]:
        return [item for item in items if not self._only or item.owner in self._only]

    def _steps(self, items: Iterable[Owned]) -> list[LaunchStep]:
        return [LaunchStep(item.command) for item in self._chosen(items)]

    # ---- doing it ---------------------------------------------------------------

    def _show_outputs(self, commands: list[Command]) -> None:
        self._prepare()
        for command in commands:
            self._show(shlex.join(command.arguments))
            if not self._dry_run:
                self._show(call(command).rstrip())

    def _prepare(self) -> None:
        for command in self._deployment.prepare:
            self._show(shlex.join(command.arguments))
            if not self._dry_run:
                call(command)

    def _carry_out(self, steps: list[LaunchStep]) -> None:
        for step in steps:
            self._show(shlex.join(step.command.arguments))
        if self._dry_run or not steps:
            return
        if not self._confirm(f"run these {len(steps)} commands?"):
            return
        with bar(Console(stderr=True), f"{len(steps)} commands") as report:
            for done, step in enumerate(steps, start=1):
                self._carry_out_one(step)
                report(done / len(steps))

    def _carry_out_one(self, step: LaunchStep) -> None:
        if step.makes is not None:
            self._record.add(step.makes, content="")
        self._show(f"$ {shlex.join(step.command.arguments)}")
        result = attempt(step.command)
        if result.code and not (step.deletes and result.not_found):
            raise failure(step.command, result)
        if result.output.strip():
            self._show(result.output.rstrip())
        if step.makes is not None:
            self._record.add(step.makes, step.makes.content)
        if step.deletes:
            self._record.remove(step.deletes)


def _status_of(text: str) -> dict[str, Any]:
    try:
        status: dict[str, Any] = json.loads(text)
        status["phase"]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{text.strip()!r} is no status ({error!r})") from error
    return status


def _state_of_job(text: str, resource: Resource) -> str:
    """Return the state of the newest job of that name; empty if it is dead."""
    begins = re.search(r"^\[", text, re.MULTILINE)  # After what else it says.
    if begins is None:
        raise CommandError(f"`sky jobs queue` printed no list of jobs: {text!r}")
    queue = json.loads(text[begins.start() :])
    jobs = [job for job in queue if job["job_name"] == resource.job]
    newest = max(jobs, key=lambda job: job["job_id"], default={"status": ""})
    state = str(newest["status"])
    return "" if state in resource.dead else state


def _deletions(entries: list[dict[str, Any]]) -> list[LaunchStep]:
    """Return the commands that delete these entries, newest first."""
    return [
        LaunchStep(
            Command(tuple(entry["delete"]), entry["deadline_s"]), deletes=entry["what"]
        )
        for entry in reversed(entries)
    ]
