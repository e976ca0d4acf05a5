"""What can happen while a coordinator gathers anchors, and what follows from it: the
interface of `gathering.py`, as `coordinator/events.py` is that of the usual half.

Events that both halves know (`Said`, `Disconnected`, `Timer`) and the effect `Tell` are
those of `coordinator/events.py`.
"""

from __future__ import annotations

import msgspec

from diloco_jax.protocol.coordinator.events import Disconnected, Said, Tell, Timer
from diloco_jax.protocol.messages import Hello
from diloco_jax.protocol.values import Version

# ---- events -------------------------------------------------------------------


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """An island says hello: its anchors, and what it heard last. `differences`: between
    its config and the coordinator's, in words."""

    hello: Hello
    differences: tuple[str, ...] = ()


class AnchorArrived(msgspec.Struct, frozen=True, kw_only=True):
    """An anchor is here, all of it."""

    island: str
    incarnation: int
    fragment: int
    version: Version


Event = Offered | Said | Disconnected | AnchorArrived | Timer

# ---- effects ------------------------------------------------------------------


class Postpone(msgspec.Struct, frozen=True, kw_only=True):
    """The island is to come again later: its session ends with this reason."""

    session: str
    message: str


class Discard(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an anchor is not waited for any more."""

    island: str
    incarnation: int
    fragment: int


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """All fragments are here: the new term can begin."""

    run_id: str
    term: int
    versions: tuple[Version, ...]
    sources: tuple[str, ...]
    """The island that each fragment came from."""
    replaced: tuple[Version, ...]
    """The versions that they had there."""
    tokens: int
    next_position: int


class GiveUp(msgspec.Struct, frozen=True, kw_only=True):
    """There will be no term: the process ends with this reason."""

    message: str


Effect = Tell | Postpone | Discard | Open | GiveUp
