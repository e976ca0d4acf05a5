"""Safety of speeds: no island counts as faster than the config allows, and none that
tells the truth about its steps is put out for that.
"""

from __future__ import annotations

from collections.abc import Sequence

from diloco_jax.coordinator.engine import AnyEffect
from diloco_jax.protocol.coordinator.events import Tell
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.messages import Refused
from diloco_jax.simulation.faults.observing import Invariant


class SpeedsKept(Invariant):
    """No step time below the config's is believed, whatever an island says.

    No island of these worlds says that it made steps that it did not make, so none is
    refused for such a claim.
    """

    name = "speeds"
    effects = (Refused,)

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self._least_s = config.least_seconds

    def stepped(self, state: State, changed: Sequence[Island], *, writes: bool) -> None:
        for island in changed:
            name, step_s = island.name, island.step_seconds
            least_s = self._least_s.get(name, 0.0) * island.sequences_per_step
            believed = not 0 < step_s < least_s
            self.hold(believed, "too fast:", name, step_s, "s, is", least_s)

    def decided(self, state: State, effects: Sequence[AnyEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Tell) and isinstance(effect.message, Refused):
                refused = effect.message
                self.hold(refused.code != "claims", "refused:", refused.message)
