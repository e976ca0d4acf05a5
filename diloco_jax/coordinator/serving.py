"""One life of a coordinator, from its start to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.coordinator.hanging import TurnWatch

if TYPE_CHECKING:
    from diloco_jax.coordinator.main import Coordinator


def serve(coordinator: Coordinator) -> int:
    """Serve by this coordinator until its end; return the exit code.

    Whatever ends it, on its own thread or at a holder, comes through here. Only a hang
    ends the process itself.
    """
    try:
        coordinator.start(coordinator.heed_signals)
        with TurnWatch(coordinator.config.placement) as watch:
            watch.start()
            code = coordinator.run(watch.touch)
        return code or coordinator.conclude()
    finally:
        coordinator.close()
