"""Safety of the end: the run does not end before what its islands made last is in."""

from __future__ import annotations

from diloco_jax.protocol.coordinator.state import Fragment, State
from diloco_jax.protocol.reasons import EndReason
from diloco_jax.simulation.faults.observing import Invariant

ENDS: tuple[EndReason, ...] = ("finished", "absent")


class LastStepsMerged(Invariant):
    """The end of a run costs no island its steps, live or silent for less than a lease.

    Nothing of these worlds keeps a delta back for as long as the flush waits. Deltas
    that are refused, and steps that an adoption undoes, are lost by other reasons.
    """

    name = "last_steps"

    def ends(self, before: State, after: State, now: float) -> None:
        for name, island in before.islands.items():
            away = island.status == "absent" and now >= island.lease_until
            if island.status == "gone" or away:
                continue
            for was, fragment in zip(before.fragments, after.fragments, strict=True):
                lost = _lost(fragment, name) - _lost(was, name)
                what = "the run ends, and loses so many tokens of who is there:"
                self.hold(not lost, what, lost, name, island.status, fragment.index)


def _lost(fragment: Fragment, name: str) -> int:
    lost = fragment.accounts[name].lost_tokens
    return sum(lost.get(reason, 0) for reason in ENDS)
