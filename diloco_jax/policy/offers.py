"""What can happen while a coordinator gathers anchors, and what follows from it: the
interface of `gathering.py`, as `events.py` is that of the rest of the policy."""

from __future__ import annotations

import dataclasses

from diloco_jax.policy.events import Version

# ---- events -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """A sign of life of an island that offered."""

    island: str
    session: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lost:
    """A session's connection broke; the island may come back on another."""

    island: str
    session: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """An anchor is here, all of it."""

    island: str
    incarnation: int
    fragment: int
    version: Version


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Time passed; due when `next_deadline` says so."""


Event = Offer | Heard | Lost | Arrived | Tick

# ---- effects ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Admit:
    """The island's offer is taken; it waits, connected, to be asked."""

    island: str
    session: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Postpone:
    """The island is to come again later: its session ends with this reason."""

    island: str
    session: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """The island is to send its anchor of the fragment."""

    island: str
    session: str
    fragment: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Discard:
    """What came of an anchor is not waited for any more."""

    island: str
    incarnation: int
    fragment: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Open:
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GiveUp:
    """There will be no term: the process ends with this reason."""

    message: str


Effect = Admit | Postpone | Ask | Discard | Open | GiveUp
