"""Safety of workers on machines of their own: each has one lead, the newest."""

from __future__ import annotations

from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.simulation.faults.observing import Invariant


class NewestObeyed(Invariant):
    """A worker that has gone on with a lead goes on with no lead before it: of an
    earlier reign, or of an earlier start in this one.
    """

    name = "obeyed"

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._newest: dict[int, tuple[int, int, int]] = {}

    def obeys(self, worker: int, lead: tuple[int, int, int]) -> None:
        newest = self._newest.get(worker, lead)
        self.hold(
            lead >= newest,
            "worker {} goes on with lead {} (mandates made anew, reign, start), and "
            "has obeyed {}",
            worker,
            lead,
            newest,
        )
        self._newest[worker] = lead
