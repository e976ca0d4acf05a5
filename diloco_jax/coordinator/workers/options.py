"""The options of `diloco worker`."""

from __future__ import annotations

import dataclasses

from diloco_jax.config import ConfigError, Placement
from diloco_jax.config.fields import setting
from diloco_jax.wire import addresses


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """The options of `diloco worker`."""

    index: int = setting(-1, help="Number of the worker, from 0.")

    listen: str = setting(
        "",
        help="HOST:PORT where it listens, and serves islands at the next port; empty = "
        "its address in placement.worker_addresses.",
    )

    def address(self, placement: Placement) -> str:
        """Return where the worker listens. Raises ConfigError, naming option or
        field."""
        given = placement.worker_addresses
        if not given:
            raise ConfigError(
                "placement.worker_addresses is empty: the coordinator starts its "
                "workers itself; name there where each worker runs, or leave `diloco "
                "worker` out"
            )
        if not 0 <= self.index < len(given):
            raise ConfigError(
                f"--index {self.index}, but placement.worker_addresses has "
                f"{len(given)} addresses; give a number from 0 to {len(given) - 1}"
            )
        dialled = given[self.index]
        own = self.listen or dialled
        _, port = addresses.parse_address(own, "--listen")
        if port != addresses.parse_address(dialled)[1]:
            raise ConfigError(
                f"--listen {own}, but the coordinator dials {dialled} "
                f"(placement.worker_addresses); give the same port"
            )
        return own
