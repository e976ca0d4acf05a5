"""Safety of the end: the run does not end before what its islands made last is in."""

from __future__ import annotations

from diloco_jax.protocol.coordinator.state import Fragment, PolicyConfig, State
from diloco_jax.protocol.reasons import EndReason
from diloco_jax.simulation.faults.observing import Incarnation, Invariant

ENDS: tuple[EndReason, ...] = ("finished", "absent")


class LastStepsMerged(Invariant):
    """The end of a run costs no island its steps, unless it is silent for longer than a
    lease meanwhile, or its step outlasts the flush.

    Nothing of these worlds keeps a delta back for so long. Deltas that are refused, and
    steps that an adoption undoes, are lost by other reasons.
    """

    name = "last_steps"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._away: set[Incarnation] = set()
        """Those that were silent for too long."""

    def ending(self, before: State, after: State, now: float) -> None:
        for name, island in before.islands.items():
            if island.status == "absent" and now >= island.lease_until:
                self._away.add((name, island.incarnation))
        if after.phase != "done":
            return
        for name, island in before.islands.items():
            who = name, island.incarnation
            trains = island.phase == "training" and now >= before.deadline
            if island.status == "gone" or trains or who in self._away:
                continue
            for was, fragment in zip(before.fragments, after.fragments, strict=True):
                lost = _lost(fragment, name) - _lost(was, name)
                what = "the run ends, and loses so many tokens of who is there:"
                self.hold(not lost, what, lost, name, island.status, fragment.index)


def _lost(fragment: Fragment, name: str) -> int:
    lost = fragment.accounts[name].lost_tokens
    return sum(lost.get(reason, 0) for reason in ENDS)
