"""Events and effects of a coordinator that gathers anchors: the interface of
`gathering.py`, as `coordinator/events.py` is that of the coordinator's usual half.

The events that both halves know (`Said`, `Disconnected`, `Timer`) and the effects
`Alert` and `Tell` are in `coordinator/events.py`.
"""

from __future__ import annotations

import msgspec

from diloco_jax.protocol.coordinator.events import (
    Alert,
    Disconnected,
    Said,
    Tell,
    Timer,
)
from diloco_jax.protocol.messages import Hello
from diloco_jax.protocol.values import Version

# ---- events -------------------------------------------------------------------


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """An island says hello, with its anchors' versions and its last news of the run.
    `differences`: between its config and the coordinator's, in words."""

    hello: Hello
    differences: tuple[str, ...] = ()


class AnchorArrived(msgspec.Struct, frozen=True, kw_only=True):
    """A whole anchor has arrived."""

    island: str
    incarnation: int
    fragment: int
    version: Version


Event = Offered | Said | Disconnected | AnchorArrived | Timer

# ---- effects ------------------------------------------------------------------


class Postpone(msgspec.Struct, frozen=True, kw_only=True):
    """End a session with this reason; the island is to come again later."""

    session: str
    message: str


class Discard(msgspec.Struct, frozen=True, kw_only=True):
    """Discard the part of an anchor that has arrived; the rest is no longer awaited."""

    island: str
    incarnation: int
    fragment: int


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """Begin the new term: all fragments have arrived."""

    run_id: str
    term: int
    versions: tuple[Version, ...]
    sources: tuple[str, ...]
    """The island that each fragment came from."""
    replaced: tuple[Version, ...]
    """Version of each fragment on that island."""
    tokens: int
    next_position: int
    offered: tuple[str, ...] = ()
    """Islands that offered anchors; they come again as the term begins."""


class GiveUp(msgspec.Struct, frozen=True, kw_only=True):
    """End the process with this reason: there will be no new term."""

    message: str


Effect = Alert | Tell | Postpone | Discard | Open | GiveUp
