"""The signs of life of a worker's process."""

from __future__ import annotations

import resource
import secrets

from diloco_jax.machine import resident_bytes
from diloco_jax.protocol.holding import WorkerAlive

_PROCESS = secrets.token_hex(8)


def sign_of_life(alerts: tuple[str, ...] = ()) -> WorkerAlive:
    """Return a sign of life of this process. alerts: see `WorkerAlive`."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return WorkerAlive(
        alerts=alerts,
        memory_bytes=kib << 10,
        resident_bytes=resident_bytes(),
        process=_PROCESS,
    )
