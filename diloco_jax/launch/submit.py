"""Act on a deployment: look for its resources, ask, and run one command after another.

A resource is recorded before it is made, with the command that deletes it, so every
action may be interrupted and repeated.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar

from rich.console import Console

from diloco_jax.launch.calls import CommandError, attempt, call, failure
from diloco_jax.launch.record import LaunchRecord
from diloco_jax.launch.resources import Command, Deployment, Owned, Resource
from diloco_jax.launch.states import HEARD_S, is_heard, is_unwell, state_of
from diloco_jax.observability.terminal import bar


class _HasOwner(Protocol):
    @property
    def owner(self) -> str: ...


UNWELL_ROUNDS = 30
"""Looks in a row after which a slice is made anew that is not dead, but unwell, and
whose island is silent. Repairs and maintenance may end, and another slice may not come.
"""

Item = TypeVar("Item", bound=_HasOwner)


class LaunchStep(NamedTuple):
    """A command that changes something."""

    command: Command
    makes: Resource | None = None
    deletes: str = ""
    """Resource that the command deletes; it may be gone already."""
    whole: bool = True
    """False if more commands follow until what it makes has its content."""
    again: bool = False
    """True if what is deleted is made anew next, so that it stays recorded."""


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
        self.deployment, self._record = deployment, record
        self._only, self._show, self._confirm = only, show, confirm
        self.dry_run = dry_run
        self._silent: set[str] = set()
        """Islands that the coordinator does not hear, by its last answer."""
        self._unwell: dict[str, int] = {}
        """By resource: looks in a row at which it was unwell and its island silent."""

    def create(self) -> None:
        """Make every resource that is missing, and make useless ones anew."""
        self.prepare()
        known = {resource.what for resource in self.deployment.resources}
        for entry in self._record.made:
            if entry["what"] not in known:
                by_hand = shlex.join(entry["delete"])
                self._show(
                    f"# left over: {entry['what']}, which this config does not make; "
                    f"it stays until {by_hand}"
                )
        self._carry_out(self._missing(self.deployment.resources))

    def run(self) -> None:
        """Start the processes again on the existing machines."""
        self.prepare()
        processes = [r for r in self.deployment.resources if r.runs or r.content]
        self._carry_out(
            [*self._missing(processes), *self._steps(self.deployment.start)]
        )

    def logs(self) -> None:
        """Print the last lines of every process."""
        self._show_outputs([o.command for o in self._chosen(self.deployment.logs)])

    def status(self) -> dict[str, Any]:
        """Return what `diloco status --json` prints on the coordinator's machine; empty
        in a dry run."""
        self.prepare()
        for command in self.deployment.statuses:
            self._show(shlex.join(command.arguments))
        return {} if self.dry_run else self._ask()

    def results(self) -> None:
        """Copy the run's folder to this machine."""
        if not self.deployment.results:
            raise CommandError(
                "SkyPilot does not show the machines of its managed jobs; the run is "
                "on the coordinator's disk, which any machine in its zone can mount, "
                "and snapshots are in placement.checkpoints, if that is a bucket"
            )
        self._show_outputs(list(self.deployment.results))

    # ---- for the watch, one call of the cloud after the other -----------------------

    def phase(self) -> str:
        """Return the phase of the run, as its coordinator says."""
        self._silent = set()
        status = self._ask()
        seen = status.get("islands", {})
        self._silent = {
            r.owner for r in self.deployment.resources if not is_heard(seen, r.owner)
        }
        return str(status["phase"])

    def _ask(self) -> dict[str, Any]:
        """Return the status that the coordinator which leads prints. Raises
        CommandError, with what each has said, if none does."""
        errors = []
        for command in self.deployment.statuses:
            try:
                return _status_of(call(command))
            except CommandError as error:
                errors.append(str(error))
        raise CommandError("\n".join(errors))

    def has_ended(self) -> bool:
        """Tell whether what is left of the coordinators says that the run is over: one
        has said so, and none goes on.

        Raises CommandError if they are gone and have said nothing of that kind.
        """
        ended, goes_on, lost = False, False, []
        for resource in self.deployment.resources:
            if not resource.ended:
                continue
            state = word = self._state(resource)
            dead = bool(set(state.split()) & set(resource.dead))
            if not state and self._record.is_due(resource.what):
                goes_on = True
                continue  # A last word would be that of one before it.
            if (dead or not state) and resource.last_word is not None:
                result = attempt(resource.last_word)
                if result.code and not result.not_found:
                    raise failure(resource.last_word, result)
                word = result.output.strip() if not result.code else ""
            if not set(word.split()).isdisjoint(resource.ended):
                ended = True
            elif state and dead and resource.revives:
                goes_on = True  # It is made anew.
            elif dead or not state:
                lost.append(
                    f"{resource.what} is {state or 'not there'}, and its last word is "
                    f"{word or 'none'!r}"
                )
            else:
                goes_on = True
        if lost and goes_on:
            self._show(f"# {'; '.join(lost)}: the run has one coordinator less")
        if lost and not (goes_on or ended):
            raise CommandError(
                f"{'; '.join(lost)}: the run is not over, nobody leads it, and all the "
                f"rest is paid for. Its log says why it ended; `--action create` makes "
                f"it anew, `--action delete` ends the launch"
            )
        return ended and not goes_on

    def carried(self) -> list[Resource]:
        """Return what holds files of this machine that may change while a run goes on,
        whoever reads them."""
        return [r for r in self.deployment.resources if r.carried]

    def carry(self, resource: Resource) -> None:
        """Replace its content if that has changed here. What a person has deleted is
        not made again."""
        made = {e["what"]: e.get("content", "") for e in self._record.made}
        if resource.content in ("", made.get(resource.what, resource.content)):
            return
        state = self._state(resource)
        if state or not made[resource.what]:
            self._carry_out(self._steps_for(resource, state))

    def reviving(self) -> list[Resource]:
        """Return what is to be made anew once it is taken away."""
        return self._chosen([r for r in self.deployment.resources if r.revives])

    def revive(self, resource: Resource) -> None:
        """Make it anew if it was taken away, was asked for and never came, or has been
        unwell for long while its island is silent."""
        state, what = self._state(resource), resource.what
        unwell = resource.owner in self._silent and is_unwell(state, resource)
        looks = self._unwell.get(what, 0) + 1 if unwell else 0
        self._unwell[what] = looks
        if looks:
            self._show(
                f"# {what}: {state}, and no sign of its island for {HEARD_S:g} s, at "
                f"look {looks}; at {UNWELL_ROUNDS} in a row it is made anew"
            )
        dead = looks >= UNWELL_ROUNDS
        steps = self._steps_for(resource, state, taken=True, dead=dead)
        if self._carry_out(steps) and dead:
            self._unwell[what] = 0

    def released(self) -> list[dict[str, Any]]:
        """Return the recorded resources but the run, newest first."""
        return [e for e in reversed(self._recorded()) if not e["keeps"]]

    def release(self, entry: dict[str, Any]) -> bool:
        """Delete a recorded resource; return False if the user does not want that."""
        return self._carry_out(_deletions([entry]))

    # ---- the end ----------------------------------------------------------------

    def stop(self) -> None:
        """End the processes: islands say goodbye, the coordinator sums up. Machines
        stay."""
        self.prepare()
        processes = [entry for entry in self._recorded() if entry["runs"]]
        self._carry_out([*_deletions(processes), *self._steps(self.deployment.stop)])

    def delete(self, *, disk: bool) -> None:
        """Delete everything; keep the disk that holds the run unless `disk`."""
        self.prepare()
        entries = self._recorded()
        self._carry_out(_deletions([e for e in entries if disk or not e["keeps"]]))
        if not disk:
            self.show_kept()

    def show_kept(self) -> None:
        """Say which resources stay, since they hold the run."""
        for entry in self._recorded():
            if entry["keeps"]:
                self._show(f"# kept: {entry['what']}; it belongs to the run (--disk)")

    # ---- what there is to do ----------------------------------------------------

    def _missing(self, resources: Iterable[Resource]) -> list[LaunchStep]:
        """Return the steps that make what is missing."""
        steps = []
        for resource in resources:
            # The files that processes read must be right, whichever owners are chosen.
            if resource.content or self._chosen([resource]):
                steps += self._steps_for(resource, self._state(resource))
        return steps

    def _steps_for(
        self, resource: Resource, state: str, *, taken: bool = False, dead: bool = False
    ) -> list[LaunchStep]:
        """Return the steps that put a resource right. taken: only if it is dead, or was
        asked for and never came; what else is not there was given back. dead: it is,
        whatever its state says."""
        steps = []
        dead = dead or bool(set(state.split()) & set(resource.dead))
        if state:
            self._show(f"# there: {resource.what}: {state}")
        if state and not dead:
            known = self._record.content(resource.what)
            self._record.add(resource, known)
            if resource.content != known:
                *first, last = *resource.grant, *resource.update
                # Broken off between them, it has no content that is known.
                steps += [LaunchStep(c, makes=resource, whole=False) for c in first]
                steps.append(LaunchStep(last, makes=resource))
            return steps
        if taken and not (state or self._record.is_due(resource.what)):
            return []
        if state and resource.delete is not None:
            what = resource.what
            steps.append(LaunchStep(resource.delete, deletes=what, again=True))
        *first, last = resource.create, *resource.grant
        steps += [LaunchStep(c, makes=resource, whole=False) for c in first]
        steps.append(LaunchStep(last, makes=resource))
        return steps

    def _state(self, resource: Resource) -> str:
        return "" if self.dry_run else state_of(resource)

    def _recorded(self) -> list[dict[str, Any]]:
        only = self._only
        return [e for e in self._record.made if not only or e["owner"] in only]

    def _chosen(self, items: Iterable[Item]) -> list[Item]:
        return [item for item in items if not self._only or item.owner in self._only]

    def _steps(self, items: Iterable[Owned]) -> list[LaunchStep]:
        return [LaunchStep(item.command) for item in self._chosen(items)]

    # ---- doing it ---------------------------------------------------------------

    def _show_outputs(self, commands: list[Command]) -> None:
        self.prepare()
        for command in commands:
            self._show(shlex.join(command.arguments))
            if not self.dry_run:
                self._show(call(command).rstrip())

    def prepare(self) -> None:
        for command in self.deployment.prepare:
            self._show(shlex.join(command.arguments))
            if not self.dry_run:
                call(command)

    def _carry_out(self, steps: list[LaunchStep]) -> bool:
        """Return False if the user does not want it."""
        for step in steps:
            self._show(shlex.join(step.command.arguments))
        if self.dry_run or not steps:
            return True
        if not self._confirm(f"run these {len(steps)} commands?"):
            return False
        for step in steps:
            if step.makes is not None and step.makes.revives:
                self._record.add(step.makes, content="", due=True)
        with bar(Console(stderr=True), f"{len(steps)} commands") as report:
            for done, step in enumerate(steps, start=1):
                self._carry_out_one(step)
                report(done / len(steps))
        return True

    def _carry_out_one(self, step: LaunchStep) -> None:
        if step.makes is not None:
            self._record.add(step.makes, content="", due=step.makes.revives)
        self._show(f"$ {shlex.join(step.command.arguments)}")
        result = attempt(step.command)
        if result.code and not (step.deletes and result.not_found):
            raise failure(step.command, result)
        if result.output.strip():
            self._show(result.output.rstrip())
        if step.makes is not None:
            self._record.add(step.makes, step.makes.content if step.whole else "")
        if step.deletes and not step.again:
            self._record.remove(step.deletes)


def _status_of(text: str) -> dict[str, Any]:
    try:
        status: dict[str, Any] = json.loads(text)
        status["phase"]
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"{text.strip()!r} is no status ({error!r})") from error
    return status


def _deletions(entries: list[dict[str, Any]]) -> list[LaunchStep]:
    """Return the commands that delete these entries, newest first."""
    return [
        LaunchStep(
            Command(tuple(entry["delete"]), entry["deadline_s"]), deletes=entry["what"]
        )
        for entry in reversed(entries)
    ]
