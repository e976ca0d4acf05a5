"""Liveness: bounds on the time to the next progress and to the end of a run, and
the expectations of a world of faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from diloco_jax.config.placement import Deadlines
from diloco_jax.protocol.coordinator.anchors import LEASES_AWAITED
from diloco_jax.protocol.coordinator.ending import OPEN_BY
from diloco_jax.simulation.clock import Clock
from diloco_jax.simulation.faults.facts import ViolationError
from diloco_jax.simulation.faults.faults import LEASE_S, PATIENCE_S, LongDeltas, Unfit
from diloco_jax.simulation.faults.schedule import (
    RESTART_S,
    RETRY_S,
    SEQUENCE_LENGTH,
    Schedule,
)

NAME = "liveness"


def merges_within_s(schedule: Schedule) -> float:
    """Bound the time in which every fragment merges once faults have stopped.

    The bound holds again and again, as long as the run has not got its tokens. It is
    the sum of: a lease, after which silent islands are not awaited; a reunion
    (`Deadlines.reunion_s`), for which ticks wait; a restart of refused islands, with a
    retry and a join; two cycles, since ticks go on from where they were and counters
    restart; a step of the slowest island, a transfer and a merge; and the time in which
    the hosts of an island agree on a take and an adoption; and if a worker has lost its
    disk, the time to gather its fragments; and the time until an island is out of
    quarantine, if a quorum needs it.
    """
    joins_s = max(plan.join_s for plan in schedule.islands.values())
    awaited_s = LEASE_S + Deadlines(LEASE_S).reunion_s
    back_s = awaited_s + RESTART_S + RETRY_S + joins_s + schedule.transfer_s
    cycles_s = 2 * schedule.steps_per_cycle * schedule.pacing_s
    lost = any(getattr(fault, "disk_lost", False) for fault in schedule.faults)
    lost_s = gathered_within_s(schedule) if lost else 0.0
    lost_s += released_within_s(schedule)
    return back_s + lost_s + cycles_s + _merged_s(schedule) + _agreed_s(schedule)


def gathered_within_s(schedule: Schedule) -> float:
    """Bound the time from a worker's return to the anchors of all that it has lost: a
    restart of the lead, the leases in which it awaits islands, and for each anchor and
    the ballots about it a step of the slowest island on all its hosts, and a
    transfer."""
    agreed_s = schedule.slowest_s + _agreed_s(schedule)
    anchor_s = 2 * (agreed_s + schedule.transfer_s)
    awaited_s = 2 * LEASES_AWAITED * LEASE_S + 2 * RETRY_S
    return RESTART_S + awaited_s + len(schedule.fragment_sizes) * anchor_s


def released_within_s(schedule: Schedule) -> float:
    """Bound the time in which an island leaves quarantine; 0 if a merge needs none.

    Its first delta of a fragment may come before those of others by which it is judged,
    and each refusal takes the fragment's next turn: it is adopted after the delta's
    way. So two deltas are sent and answered in four cycles.
    """
    unfit = (LongDeltas, Unfit)
    liars = {fault.island for fault in schedule.faults if isinstance(fault, unfit)}
    if schedule.quorum <= len(schedule.islands) - len(liars):
        return 0.0
    cycles_s = 4 * schedule.steps_per_cycle * schedule.pacing_s
    return cycles_s + _merged_s(schedule) + _agreed_s(schedule)


def takes_within_s(schedule: Schedule) -> float:
    """Bound the time in which every island takes every fragment.

    The island's last take is merged or refused by then, and the island is asked again.
    """
    return merges_within_s(schedule) + 2 * (
        schedule.steps_per_cycle * schedule.pacing_s + schedule.slowest_s
    )


def over_within_s(schedule: Schedule, total_tokens: int) -> float:
    """Bound the time from the last fault, or from an extension, to the end of a run of
    so many tokens.

    Steps whose deltas always come late may all be lost, under every adopt rule. So only
    a merge's own promise counts: it has K deltas, each with all steps of its island
    since its last take. An island with an open take is not asked, but its next delta is
    longer, and the second merge settles the take. So the steps of K islands, the
    slowest at worst, count in at least every other cycle.

    Under a rule that loses the steps between take and adoption, a delta may hold one
    step, however long it waits. Then one step counts in the cycles in which a take is
    open, and one more cycle.

    A coordinator that finds that it slept during the end listens for one more lease,
    and has the flush's last share of time after that. For a sleep that its clock does
    not count, the end waits as long.
    """
    rates = sorted(plan.batch_size / plan.step_s for plan in schedule.islands.values())
    tokens_per_s = SEQUENCE_LENGTH * sum(rates[: schedule.quorum])
    if schedule.rule.loses_steps:
        cycle_s = schedule.steps_per_cycle * schedule.pacing_s
        open_s = _agreed_s(schedule) + _merged_s(schedule)
        tokens_per_s /= schedule.steps_per_cycle * (1 + math.ceil(open_s / cycle_s))
    else:
        tokens_per_s /= 2
    anew_s = total_tokens / tokens_per_s
    flush_s = Deadlines(LEASE_S).flush_s
    ends_s = LEASE_S + flush_s
    for fault in schedule.faults:
        if fault.awaits_end:
            ends_s += LEASE_S + (1 - OPEN_BY) * flush_s + getattr(fault, "for_s", 0.0)
    return merges_within_s(schedule) + anew_s + ends_s


def _agreed_s(schedule: Schedule) -> float:
    """Return the time in which hosts of an island agree on a take and an adoption."""
    return 2 * max(p.lookahead for p in schedule.islands.values()) * schedule.slowest_s


def _merged_s(schedule: Schedule) -> float:
    """Return the time of a step of the slowest island, a transfer and a merge; and that
    in which both donors of a publish may be asked in vain."""
    region = any(plan.region for plan in schedule.islands.values())
    asked_s = region * schedule.overlap_steps * schedule.slowest_s / 2
    return schedule.slowest_s + schedule.transfer_s + schedule.merge_s + asked_s


class Expectations:
    """Progress is expected from the time at which the last fault has ended, and after
    each extension anew. lacks_tokens: tells whether the run lacks tokens; until then
    every one of the `counts` must grow, again and again."""

    def __init__(
        self, schedule: Schedule, clock: Clock, lacks_tokens: Callable[[], bool]
    ) -> None:
        self.counts: dict[str, Callable[[], Mapping[Any, int]]] = {}
        """Merges, then takes: counts by what is counted, and a name of it."""
        self._schedule, self._clock = schedule, clock
        self._lacks_tokens = lacks_tokens
        self._tokens = schedule.total_tokens
        self._left = sum(not fault.awaits_end for fault in schedule.faults)
        """Faults that have not ended."""
        self._down = False
        """All processes have ended, and start again to extend the run."""
        self._extensions = 0

    def begin(self) -> None:
        """Expect that all faults strike in time."""
        self._expect_if_calm()
        self._clock.after(PATIENCE_S, self._out_of_patience)

    def begin_again(self, after_s: float, tokens: int) -> None:
        """Expect progress of a run that is extended, once its processes have started;
        nothing else any more."""
        self._tokens, self._down = tokens, True
        self._extensions += 1
        self._clock.after(after_s, self._is_up)

    def _is_up(self) -> None:
        self._down = False
        self._expect_if_calm()

    def fault_ended(self) -> None:
        """Expect that the run goes on, if it was the last one."""
        self._left -= 1
        self._expect_if_calm()

    def _out_of_patience(self) -> None:
        if self._left:
            what = f"not all faults have struck within {PATIENCE_S} s"
            raise ViolationError(NAME, what)

    def _expect_if_calm(self) -> None:
        if self._left or self._down:
            return
        schedule, extensions = self._schedule, self._extensions
        bounds = merges_within_s(schedule), takes_within_s(schedule)
        for what, within_s in zip(self.counts, bounds, strict=True):
            self._expect(what, within_s, extensions)
        over_s = over_within_s(schedule, self._tokens)

        def must_be_over() -> None:
            if self._extensions == extensions:
                what = f"the run is not over after {over_s:.1f} s"
                raise ViolationError(NAME, what)

        self._clock.after(over_s, must_be_over)

    def _expect(self, what: str, within_s: float, extensions: int) -> None:
        before = self.counts[what]()

        def must_have_grown() -> None:
            if self._extensions > extensions or not self._lacks_tokens():
                return
            now = self.counts[what]()
            stuck = [key for key, count in now.items() if count == before[key]]
            if stuck:
                raise ViolationError(NAME, f"no {what} {stuck} within {within_s:.1f} s")
            self._expect(what, within_s, extensions)

        self._clock.after(within_s, must_have_grown)
