"""Safety of the end: the run does not end before what its islands made last is in."""

from __future__ import annotations

from diloco_jax.protocol.coordinator.ending import OPEN_BY
from diloco_jax.protocol.coordinator.state import Fragment, PolicyConfig, State
from diloco_jax.protocol.values import EndReason
from diloco_jax.simulation.faults.observing import Incarnation, Invariant

ENDS: tuple[EndReason, ...] = ("finished", "absent")


class LastStepsMerged(Invariant):
    """The end of a run costs no island its steps, unless it is silent for longer than a
    lease meanwhile, its step outlasts the flush, or a delta of its own hangs for the
    flush's share in which others are not to wait for it.

    Deltas that are refused, and steps that an adoption undoes, are lost by other
    reasons.
    """

    name = "last_steps"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._exempt: set[Incarnation] = set()
        """Those that were silent for too long, or had a delta that hung."""
        self._awaited: dict[tuple[Incarnation, int], float] = {}
        """Times since which islands' deltas of fragments are awaited: they are on their
        way, or are taken after an adoption that is, once or again."""

    def ending(self, before: State, after: State, now: float) -> None:
        for name, island in before.islands.items():
            if island.status == "absent" and now >= island.lease_until:
                self._exempt.add((name, island.incarnation))
        self._look_for_hanging(before, now)
        if after.phase != "done":
            return
        for name, island in before.islands.items():
            who = name, island.incarnation
            trains = island.phase == "training" and now >= before.deadline
            if island.status == "gone" or trains or who in self._exempt:
                continue
            for was, fragment in zip(before.fragments, after.fragments, strict=True):
                lost = _lost(fragment, name) - _lost(was, name)
                what = "the run ends, and loses so many tokens of who is there:"
                self.hold(not lost, what, lost, name, island.status, fragment.index)

    def _look_for_hanging(self, state: State, now: float) -> None:
        awaited = {
            ((name, account.incarnation), fragment.index)
            for fragment in state.fragments
            for name, account in fragment.accounts.items()
            if (take := account.take) is not None and not take.arrived
        }
        self._awaited = {key: self._awaited.get(key, now) for key in awaited}
        for (who, _), since in self._awaited.items():
            if now - since >= OPEN_BY * self.config.flush_s:
                self._exempt.add(who)


def _lost(fragment: Fragment, name: str) -> int:
    lost = fragment.accounts[name].lost_tokens
    return sum(lost.get(reason, 0) for reason in ENDS)
