"""The place of a coordinator beside the mandate, if there is none: it leads, and
nothing waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diloco_jax.coordinator.holding.fragment_snapshots import FragmentSnapshots
from diloco_jax.coordinator.holding.publishes import Publishes
from diloco_jax.coordinator.log import RecordLog
from diloco_jax.coordinator.state_snapshots import StateSnapshots
from diloco_jax.coordinator.workers.supervised import Heard
from diloco_jax.observability.tape import Tape
from diloco_jax.wire.followed import Followable


class Unseated:
    """A coordinator without a mandate; `seat.Seat` is one with it."""

    followable: Followable | None = None
    """Source of a standby's stream, if there may be a standby."""

    def judge(self, error: BaseException) -> None:
        """Judge the disk by the error that ends this coordinator. If the disk is
        broken, a standby that has everything may lead at once."""

    def serve(self, nudge: Callable[[], None]) -> None:
        """Go on beside a lead, which has its state, and calls `turn`. nudge: has it do
        so soon; it must not block."""

    def watch(self, log: RecordLog, tape: Tape, states: StateSnapshots) -> None:
        """Have a standby sent what these write from now on."""

    def watch_fragments(
        self, publishes: Publishes, snapshots: FragmentSnapshots
    ) -> None:
        """Have a standby sent what these write from now on."""

    def heard(
        self, message: Heard, then: Callable[[], None], waits: Callable[[], None]
    ) -> None:
        """Have a standby sent the file of which a worker's message tells; on any
        thread. then: lets the lead hear of it; called, on some thread, once the file is
        ahead of whatever the lead writes. waits: called first if that takes a while."""
        then()

    def turn(
        self, alert: Callable[[str], None], end_sessions: Callable[[str], None]
    ) -> None:
        """Do what has to be done on the lead's thread. Raises Refused once another node
        leads: the process must end."""

    @property
    def reign(self) -> int:
        """Number of this node's turn to lead, which every take-over raises; from 1."""
        return 1

    @property
    def written(self) -> int:
        """The number of what the lead wrote last."""
        return 0

    def may_show(self, number: int) -> bool:
        """Tell if what is written up to that number may be seen now."""
        return True

    def begun(self) -> None:
        """Note that the state that was gathered is durable."""

    def ended(self) -> None:
        """Have the mandate say that the run is over."""

    def finish(self, patience_s: Callable[[], float]) -> bool:
        """Wait until the mandate says so, after `ended`; return False if it has not
        within that time. patience_s: is asked again and again."""
        return True

    def shown(self) -> dict[str, Any]:
        """Return what the status says of the mandate."""
        return {}

    def close(self) -> None:
        """Hold the mandate no longer; it ends by itself."""
