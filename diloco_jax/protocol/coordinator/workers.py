"""Deal fragments to workers, and say which incarnations have ended to those that begin.

Lead and workers end together, so no decision is about a worker that is away.
"""

from __future__ import annotations

import functools

from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.holding import Forget


@functools.lru_cache(maxsize=8)
def deal(sizes: tuple[int, ...], workers: int) -> tuple[int, ...]:
    """Return the worker of each fragment: the largest fragment first, each to the
    worker with the fewest parameters. sizes: parameters by fragment."""
    held, dealt = [0] * workers, [0] * len(sizes)
    for fragment in sorted(range(len(sizes)), key=lambda f: (-sizes[f], f)):
        worker = min(range(workers), key=lambda w: (held[w], w))
        held[worker] += sizes[fragment]
        dealt[fragment] = worker
    return tuple(dealt)


def fences(state: State) -> tuple[Forget, ...]:
    """Return which incarnations of each island have ended, for a worker that begins."""
    return tuple(
        Forget(
            island=name,
            before=island.incarnation + (island.status == "gone"),
            kept=(),
        )
        for name, island in sorted(state.islands.items())
    )
