"""The state of a search for anchors: its events and effects, what it aims at, and what
is known of the islands that offer theirs. `anchors.py` decides.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from diloco_jax.protocol.coordinator.believed import Heard, Known
from diloco_jax.protocol.coordinator.events import (
    Alert,
    Disconnected,
    Said,
    Tell,
    Timer,
)
from diloco_jax.protocol.coordinator.terms import FoundTerm, Gathered
from diloco_jax.protocol.holding import AnchorCompared, AnchorKept, AwaitAnchor
from diloco_jax.protocol.messages import Hello
from diloco_jax.protocol.values import Version

# ---- events -------------------------------------------------------------------


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """An island says hello, with its anchors' versions and its last news of the run.
    `differences`: between its config and the coordinator's, in words."""

    hello: Hello
    differences: tuple[str, ...] = ()


Event = Offered | Said | Disconnected | AnchorKept | AnchorCompared | Timer

# ---- effects ------------------------------------------------------------------


class Postpone(msgspec.Struct, frozen=True, kw_only=True):
    """End a session with this reason; the island is to come again later."""

    session: str
    message: str


class GiveUp(msgspec.Struct, frozen=True, kw_only=True):
    """End the process with this reason: there will be no new term. torn: two islands
    differ, and a person has to say who is believed."""

    message: str
    torn: bool = False


Effect = Alert | Tell | Postpone | AwaitAnchor | FoundTerm | GiveUp


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a search: what is lost, and who is believed."""

    lacking: tuple[int, ...]
    """Fragments without an anchor."""
    names: frozenset[str]
    """The islands that are awaited: those of the config, or the one that gives."""
    name: str = ""
    """The random name of the term that begins."""
    term: int = 0
    """Its number; 0: one above all that islands know."""
    first: bool = False
    """True: the run is new, and its parameters come from the one island."""
    known: Mapping[int, Mapping[Version, str]] | None = None
    """By lost fragment, the versions after which the log knows all merges, with the
    digests of their anchors, empty where it has none. None: there is no log."""
    trusted: str = ""
    """The island that a person believes."""
    secret: str = ""
    """Samples are drawn with it; no island knows it."""

    def sample_of(self, claim: Claim | None) -> int:
        """Return the number with which the sample of a claim is drawn; 0: the whole
        anchor is asked for. Nobody can tell it before the claim has come."""
        if claim is None:
            return 0
        of = f"{self.secret}/{claim.anchor.fragment}/{claim.anchor.digest}"
        drawn = hashlib.sha256(of.encode()).digest()[:4]
        return 1 + int.from_bytes(drawn, "little")


class AwaitedAnchor(NamedTuple):
    """The island that is to send a fragment, and the deadline."""

    island: str
    until: float


Vote = Literal["agrees", "differs", "apart", "far"]
"""differs: at the same version. apart: further than so many merges lead. far: it cannot
tell."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """An anchor that a holder has, and what other islands say of it."""

    anchor: Gathered
    asked: Mapping[str, float] = msgspec.field(default_factory=dict)
    """The deadline of each island that votes."""
    votes: Mapping[str, Vote] = msgspec.field(default_factory=dict)
    waits_until: float = 0.0
    """The end of the wait for a third island, once two differ."""

    @property
    def total(self) -> int:
        """Islands that have said anything of it, its own included."""
        return 1 + len(self.votes)

    def by(self, *votes: Vote) -> list[str]:
        """Return the islands that voted so."""
        return sorted(name for name, vote in self.votes.items() if vote in votes)

    @property
    def torn(self) -> str:
        """Describe two islands that differ, and what a person can do."""
        anchor = self.anchor
        one, two = sorted((anchor.island, *self.by("differs")))
        return (
            f"islands {one!r} and {two!r} have two anchors of fragment "
            f"{anchor.fragment} at version {tuple(anchor.replaced)}, and no third "
            f"island offers one: start the coordinator again with --trust and the "
            f"island whose values the run is to go on with, or bring a third one back"
        )


class Offering(msgspec.Struct, frozen=True, kw_only=True):
    """An island's offer. gone_at: when it is awaited no longer, unless heard before."""

    offer: Hello
    gone_at: float
    connected: bool = True


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """State of a search."""

    aim: Aim
    deadline: float
    decided_by: float = math.inf
    """The time by which most islands must be of one run."""
    phase: Literal["waiting", "fetching", "over"] = "waiting"
    run_id: str = ""
    """The run that goes on, once there is no more waiting."""
    term: int = 0
    """Number of the term that begins, likewise."""
    misfits: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Why the last offer of an island does not fit."""
    heard: Mapping[str, Heard] = msgspec.field(default_factory=dict)
    """Claims by island; one that joins may alone know of a term, and count."""
    limits: Known | None = None
    """The highest values that are believed, once there is no more waiting."""
    members: Mapping[str, Offering] = msgspec.field(default_factory=dict)
    asked: Mapping[int, AwaitedAnchor] = msgspec.field(default_factory=dict)
    failed: frozenset[tuple[str, int]] = frozenset()
    """Each (island, fragment) that did not arrive in time, or does not count."""
    claims: Mapping[int, Claim] = msgspec.field(default_factory=dict)
    """Anchors that are not judged yet, by fragment."""
    got: Mapping[int, Gathered] = msgspec.field(default_factory=dict)
    unchecked: frozenset[str] = frozenset()
    """Islands whose anchors too few others could check."""
