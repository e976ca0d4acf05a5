"""Act on a deployment: look for its resources, ask, and run one command after another.

A resource is recorded before it is made, with the command that deletes it, so every
action may be interrupted and repeated.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

from diloco_jax.launch.calls import attempt, call, failure
from diloco_jax.launch.record import LaunchRecord
from diloco_jax.launch.resources import Command, Deployment, Owned, Resource


class _HasOwner(Protocol):
    @property
    def owner(self) -> str: ...


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
        self._prepare()
        for owned in self._chosen(self._deployment.logs):
            self._show(shlex.join(owned.command.arguments))
            if not self._dry_run:
                self._show(call(owned.command).rstrip())

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

    def _missing(self, resources: Iterable[Resource]) -> list[LaunchStep]:
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
                    *first, last = resource.update
                    steps += [LaunchStep(command) for command in first]
                    steps.append(LaunchStep(last, makes=resource))
                continue
            if state and resource.delete is not None:
                steps.append(LaunchStep(resource.delete, deletes=resource.what))
            steps.append(LaunchStep(resource.create, makes=resource))
        return steps

    def _state(self, resource: Resource) -> str:
        """Return the state in words, on one line; empty if the resource is missing."""
        if self._dry_run:
            return ""
        result = attempt(resource.find)
        if result.code and not result.not_found:
            raise failure(resource.find, result)
        return "" if result.code else " ".join(result.output.split())

    def _recorded(self) -> list[dict[str, Any]]:
        only = self._only
        return [e for e in self._record.made if not only or e["owner"] in only]

    def _chosen(self, items: Iterable[Item]) -> list[Item]:
        return [item for item in items if not self._only or item.owner in self._only]

    def _steps(self, items: Iterable[Owned]) -> list[LaunchStep]:
        return [LaunchStep(item.command) for item in self._chosen(items)]

    # ---- doing it ---------------------------------------------------------------

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
        for step in steps:
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


def _deletions(entries: list[dict[str, Any]]) -> list[LaunchStep]:
    """Return the commands that delete these entries, newest first."""
    return [
        LaunchStep(
            Command(tuple(entry["delete"]), entry["deadline_s"]), deletes=entry["what"]
        )
        for entry in reversed(entries)
    ]
