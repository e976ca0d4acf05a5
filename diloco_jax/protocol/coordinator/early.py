"""Deltas at a worker of takes that the lead has not heard of since it was started.

A worker that outlives its lead has deltas whose takes the next lead does not know. It
tells of them at once. They wait here for the island's hello or record, which says what
they are of. Then the bytes count as arrived, or they are dropped.
"""

from __future__ import annotations

from msgspec.structs import replace

from diloco_jax.protocol.coordinator.events import Effect
from diloco_jax.protocol.coordinator.state import Fragment
from diloco_jax.protocol.holding import DeltaArrived, Drop
from diloco_jax.protocol.values import DeltaKey

Step = tuple[Fragment, list[Effect]]


def came(fragment: Fragment, event: DeltaArrived) -> Step:
    """Keep a delta, the newest alone of each island."""
    before = of(fragment, event.island)
    if before is not None and before.tick == event.tick:
        return fragment, []
    fragment, effects = forget(fragment, event.island)
    return replace(fragment, early=(*fragment.early, event)), effects


def of(fragment: Fragment, name: str) -> DeltaArrived | None:
    """Return the island's delta that waits, if one does."""
    return next((event for event in fragment.early if event.island == name), None)


def forget(fragment: Fragment, name: str) -> Step:
    """Drop the island's delta that waits, if one does."""
    event = of(fragment, name)
    if event is None:
        return fragment, []
    key = DeltaKey(name, event.incarnation, fragment.index, event.tick)
    return without(fragment, name), [Drop(delta=key)]


def without(fragment: Fragment, name: str) -> Fragment:
    """Return the fragment with no delta of the island that waits."""
    others = tuple(event for event in fragment.early if event.island != name)
    return replace(fragment, early=others)
