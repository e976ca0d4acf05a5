"""What can happen while a coordinator gathers anchors, and what follows from it: the
interface of `gathering.py`, as `events.py` is that of the rest of the policy."""

from __future__ import annotations

import msgspec

from diloco_jax.protocol.values import Version

# ---- events -------------------------------------------------------------------


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """An island's hello: what it has, and what it heard last. `differences`: between
    its config and the coordinator's, in words."""

    island: str
    incarnation: int
    session: str
    run_id: str
    differences: tuple[str, ...]
    term: int
    versions: tuple[Version, ...]
    """Of its anchors, by fragment; empty until it has all of them."""
    tokens: int
    """Progress of the run."""
    next_position: int
    """Up to which data was granted."""
    step_seconds: float
    sequences_per_step: int


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """A sign of life of an island that offered."""

    island: str
    session: str


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A session's connection broke; the island may come back on another."""

    island: str
    session: str


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """An anchor is here, all of it."""

    island: str
    incarnation: int
    fragment: int
    version: Version


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time passed; due when `next_deadline` says so."""


Event = Offer | Heard | Lost | Arrived | Tick

# ---- effects ------------------------------------------------------------------


class Admit(msgspec.Struct, frozen=True, kw_only=True):
    """The island's offer is taken; it waits, connected, to be asked."""

    island: str
    session: str


class Postpone(msgspec.Struct, frozen=True, kw_only=True):
    """The island is to come again later: its session ends with this reason."""

    island: str
    session: str
    message: str


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """The island is to send its anchor of the fragment."""

    island: str
    session: str
    fragment: int


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


Effect = Admit | Postpone | Ask | Discard | Open | GiveUp
