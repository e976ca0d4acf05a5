"""A connection between an island and the coordinator, in virtual time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from diloco_jax.config.fields import SECONDS, setting
from diloco_jax.simulation.virtual.clock import Clock


@dataclasses.dataclass(frozen=True, kw_only=True)
class LineSpeed:
    """Latency and bandwidth of a line.

    Example:
      >>> from diloco_jax import EmulationOptions, LineSpeed
      >>> slow = LineSpeed(latency_s=0.03, up_bytes_per_s=1e9 / 8)  # 1 Gbit/s
      >>> EmulationOptions(line=slow).line.down_bytes_per_s
      inf
    """

    latency_s: float = setting(
        0.0, SECONDS, help="Seconds that a message is under way."
    )
    up_bytes_per_s: float = setting(
        float("inf"), help="Bytes per second to the coordinator; inf = no limit."
    )
    down_bytes_per_s: float = setting(
        float("inf"), help="Bytes per second from the coordinator; inf = no limit."
    )


class Line:
    """Control messages in order, and bulk transfers that queue for each direction's
    bandwidth. Nothing arrives after `cut`.
    """

    def __init__(self, clock: Clock, speed: LineSpeed) -> None:
        self.open = True
        self._clock, self._speed = clock, speed
        self._up_free_at = self._down_free_at = 0.0

    def cut(self) -> None:
        """Break the line: everything under way is lost."""
        self.open = False

    def send_up(self, arrive: Callable[[], None]) -> None:
        """Send a control message from the island."""
        self._arrive(self._clock.now + self._speed.latency_s, arrive)

    def send_down(self, arrive: Callable[[], None]) -> None:
        """Send a control message to the island."""
        self._arrive(self._clock.now + self._speed.latency_s, arrive)

    def upload(self, nbytes: int, arrive: Callable[[], None]) -> None:
        """Send bulk bytes from the island."""
        began = max(self._clock.now, self._up_free_at)
        self._up_free_at = began + nbytes / self._speed.up_bytes_per_s
        self._arrive(self._up_free_at + self._speed.latency_s, arrive)

    def download(self, nbytes: int, arrive: Callable[[], None]) -> None:
        """Send bulk bytes to the island, the request included."""
        began = max(self._clock.now, self._down_free_at)
        self._down_free_at = began + nbytes / self._speed.down_bytes_per_s
        self._arrive(self._down_free_at + 2 * self._speed.latency_s, arrive)

    def _arrive(self, at: float, arrive: Callable[[], None]) -> None:
        self._clock.at(at, lambda: arrive() if self.open else None)
