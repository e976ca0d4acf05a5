"""Safety of a coordinator with a standby: one leads, and nothing seen is undone."""

from __future__ import annotations

from diloco_jax.protocol.standby.mandate import Mandate
from diloco_jax.simulation.faults.observing import Invariant


class OneLeads(Invariant):
    """A node that lets something be seen holds the mandate: so no two do."""

    name = "mandate"

    def shows(self, node: str, holder: str) -> None:
        self.hold(
            node == holder, "who lets something be seen, and who leads:", node, holder
        )


class InStep(Invariant):
    """The disk of a standby that the mandate calls in step has every record of which
    anyone has seen something.
    """

    name = "in_step"

    def named(self, node: str, last: int, seen: int) -> None:
        self.hold(
            last >= seen,
            "called in step with too few records; has, and seen are:",
            node,
            last,
            seen,
        )


class SeenStays(Invariant):
    """A node that goes on from a log has every record of which anyone has seen
    something: no version, grant or tick that was told goes back.
    """

    name = "seen"

    def goes_on(self, node: str, last: int, seen: int) -> None:
        self.hold(
            last >= seen, "{} goes on from its log, has {}; seen:", node, last, seen
        )


class OverStays(Invariant):
    """Nobody takes over a run of which the mandate says that it is over."""

    name = "over"

    def holds(self, node: str, before: Mandate) -> None:
        self.hold(
            node == before.holder or not before.over,
            "{} takes over, and {} has said that the run is over",
            node,
            before.holder,
        )
