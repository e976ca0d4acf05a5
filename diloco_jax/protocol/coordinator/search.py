"""The state of a search for anchors: its events and effects, what it aims at, and what
is known of the islands that offer theirs; and what is believed of them. `anchors.py`
decides.

Believed are, of islands that offer anchors, the run of most, and claims that are not
far above those of most: after the state is lost, what islands heard becomes the run's.
Of two that differ nobody can tell which is wrong: it takes three to disbelieve one.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.state import (
    Alert,
    Disconnected,
    PolicyConfig,
    Said,
    Tell,
    Timer,
)
from diloco_jax.protocol.holding import AnchorCompared, AnchorKept, AwaitAnchor
from diloco_jax.protocol.messages import MAX_TEXT, NOTHING, Hello, Refused, Version

FEWEST_TO_DISBELIEVE = 3
FAR = 2
"""Claims up to this multiple of the median are believed: an island may have been away
for long."""
TERMS_AHEAD = 16
MERGES_AHEAD = 100
POSITIONS_AHEAD = 2**20
SHARE_AHEAD = 0.01
"""Share of the run's tokens. These are believed in any case: a young run's medians are
small."""
MOST_NAMED = 8
"""Islands that one message names; the number of the others follows."""

# ---- events -------------------------------------------------------------------


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """An island says hello, with its anchors' versions and its last news of the run.
    `differences`: between its config and the coordinator's, in words."""

    hello: Hello
    differences: tuple[str, ...] = ()


Event = Offered | Said | Disconnected | AnchorKept | AnchorCompared | Timer

# ---- effects ------------------------------------------------------------------


class FoundTerm(msgspec.Struct, frozen=True, kw_only=True):
    """The search is over: its holders have all anchors on disk, none visible yet."""

    run_id: str
    term: int
    name: str
    anchors: tuple[AnchorKept, ...]
    tokens: int
    next_position: int
    offered: tuple[str, ...] = ()
    """Islands that offered anchors; they come again as the term begins."""


class Postpone(msgspec.Struct, frozen=True, kw_only=True):
    """End a session with this reason; the island is to come again later."""

    session: str
    message: str


class GiveUp(msgspec.Struct, frozen=True, kw_only=True):
    """End the process with this reason: there is no new term yet. unfit: islands came,
    and none fits this config, which a person has to change; otherwise the next process
    asks again."""

    message: str
    unfit: bool = False


Effect = Alert | Tell | Postpone | AwaitAnchor | FoundTerm | GiveUp


class Known(NamedTuple):
    """The highest values of the run that an island knows."""

    term: int = 0
    tokens: int = 0
    next_position: int = 0
    merges: int = 0
    """Number of the highest version of any fragment."""

    def higher(self, other: Known) -> Known:
        """Return the higher value of each."""
        return Known(*map(max, self, other))


class Heard(NamedTuple):
    """The highest values that an island heard of, and in which run."""

    run_id: str
    known: Known


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a search: what is lost, and who is believed."""

    lost: tuple[int, ...]
    """Fragments without an anchor: some of a run, or all of one that is lost or new."""
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
    last_name: str | None = None
    """The random name of the log's last term; None: there is no log."""
    admitted: tuple[str, ...] = ()
    """Islands that an operator let in, as far as there is a log."""
    trusted: str = ""
    """The island that a person believes."""
    secret: str = ""
    """Samples are drawn with it; no island knows it."""

    @property
    def giver(self) -> str:
        """The one island that gives first parameters."""
        (name,) = self.names
        return name

    def counts(self, fragment: int, version: Version) -> bool:
        """Tell whether the log, if there is one, knows all merges after a version."""
        return self.known is None or version in self.known[fragment]

    def sample_of(self, claim: Claim) -> int:
        """Return the number with which the sample of a claim is drawn; 0: the whole
        anchor is asked for. Nobody can tell it before the anchor has come."""
        if claim.anchor is None:
            return 0
        of = f"{self.secret}/{claim.fragment}/{claim.anchor.digest}"
        drawn = hashlib.sha256(of.encode()).digest()[:4]
        return 1 + int.from_bytes(drawn, "little")


Vote = Literal["agrees", "differs", "apart", "far"]
"""differs: at the same version. apart: further than so many merges lead. far: it cannot
tell."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """An anchor that is asked for or, once its holder has it, is judged."""

    fragment: int
    island: str
    """The island whose anchor it is."""
    until: float
    """The time by which it must come."""
    anchor: AnchorKept | None = None
    asked: Mapping[str, float] = msgspec.field(default_factory=dict)
    """The deadline of each island that votes."""
    votes: Mapping[str, Vote] = msgspec.field(default_factory=dict)
    waits_until: float = 0.0
    """The end of the wait for a third island, once two differ."""

    @property
    def deadlines(self) -> list[float]:
        """Times at which time alone changes something of it."""
        if self.anchor is None:
            return [self.until]
        return [*self.asked.values(), self.waits_until]

    def without(self, name: str) -> Claim:
        """Return it without the vote of an island, whose deadline stays. One that
        differs stays, too, until the island votes anew: nobody's anchor may count
        because who contradicts it has started again."""
        votes = {
            other: vote
            for other, vote in self.votes.items()
            if other != name or vote == "differs"
        }
        return replace(self, votes=votes)

    @property
    def total(self) -> int:
        """Islands that have said anything of it, its own included."""
        return 1 + len(self.votes)

    def by(self, *votes: Vote) -> list[str]:
        """Return the islands that voted so."""
        return sorted(name for name, vote in self.votes.items() if vote in votes)

    @property
    def torn(self) -> str:
        """Describe two islands that differ, and what a person can do; empty while
        nobody waits for a third."""
        differ = self.by("differs")
        if self.anchor is None or not self.waits_until:
            return ""
        if not len(differ) == self.total - 1 == 1:
            return ""
        one, two = sorted((self.island, *differ))
        return (
            f"islands {one!r} and {two!r} have two anchors of fragment "
            f"{self.fragment} at version {tuple(self.anchor.replaced)}, and no third "
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
    raised: frozenset[str] = frozenset()
    """Islands by whose claims the number of the term rose while anchors arrived."""
    limits: Known | None = None
    """The highest values that are believed, once there is no more waiting."""
    members: Mapping[str, Offering] = msgspec.field(default_factory=dict)
    claims: Mapping[int, Claim] = msgspec.field(default_factory=dict)
    """Anchors that are asked for, or not judged yet, by fragment."""
    failed: Mapping[tuple[str, int], str] = msgspec.field(default_factory=dict)
    """Each (island, fragment) that did not come, with an empty text, or does not count,
    and why."""
    got: Mapping[int, AnchorKept] = msgspec.field(default_factory=dict)
    unchecked: frozenset[str] = frozenset()
    """Islands whose anchors too few others could check."""


# ---- what is believed -----------------------------------------------------------


def claims_of(offer: Hello) -> Known:
    """Return the values that an island claims to know."""
    versions = (NOTHING, *offer.versions)
    return Known(
        term=max(offer.term, *(version.term for version in versions)),
        tokens=offer.tokens,
        next_position=offer.next_position,
        merges=max(version.number for version in versions),
    )


def believed_limits(known: Collection[Known], total_tokens: int) -> Known | None:
    """Return the highest values that are believed; None if too few islands claim any.

    known: the claims of the islands that offer anchors.
    """
    if len(known) < FEWEST_TO_DISBELIEVE:
        return None
    medians = map(statistics.median_low, zip(*known, strict=True))
    ahead = (
        TERMS_AHEAD,
        int(SHARE_AHEAD * total_tokens),
        POSITIONS_AHEAD,
        MERGES_AHEAD,
    )
    return Known(*(FAR * m + a for m, a in zip(medians, ahead, strict=True)))


def too_high(known: Known, most: Known | None) -> str:
    """Explain why claims are not believed; empty if they are."""
    if most is None:
        return ""
    for what, value, limit in zip(Known._fields, known, most, strict=True):
        if value > limit:
            return (
                f"it claims {what} = {value}, and at most {limit} is believed, by what "
                f"most islands claim"
            )
    return ""


def may_have_become(offered: Version, arrived: Version) -> bool:
    """Tell whether an anchor that was offered at one version may arrive at another.

    The island may have adopted a publish that was on its way.
    """
    ahead = arrived.number - offered.number
    return arrived.term == offered.term and 0 <= ahead <= MERGES_AHEAD


def run_of_most(run_ids: Iterable[str]) -> str:
    """Return the run of most islands; empty if two have as many."""
    most = statistics.multimode(run_ids)
    return most[0] if len(most) == 1 else ""


def runs_apart(offers: Iterable[Hello]) -> str:
    """Describe islands of several runs; empty if there is one run."""
    by_run: dict[str, list[str]] = {}
    for offer in offers:
        by_run.setdefault(offer.run_id, []).append(offer.island)
    if len(by_run) < 2:
        return ""
    sides = [
        f"{listed([repr(name) for name in sorted(names)])} in run {run_id}"
        for run_id, names in sorted(by_run.items())
    ]
    return (
        f"islands of {len(sides)} runs offer anchors: {listed(sides)}; the run of "
        f"most islands goes on, and among as many each nobody can tell which is the "
        f"coordinator's: start it again with --run-id and its own run, or end the "
        f"islands of the other one, or revoke their keys"
    )


def listed(texts: list[str]) -> str:
    """Name some, and count the others."""
    more = len(texts) - MOST_NAMED
    return "; ".join([*texts[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])


def misfit(config: PolicyConfig, state: Search, event: Offered) -> Refused | None:
    """Explain why an island does not fit; None if it does."""
    offer, ours = event.hello, config.run_id or state.run_id
    code, why = "", ""
    if event.differences:
        text = "; ".join(event.differences)[:MAX_TEXT]
        code = "config"
        why = (
            f"island {offer.island!r} is in run {offer.run_id} with another config: "
            f"{text} (here: this coordinator's)"
        )
        if state.aim.first:
            why = (
                f"island {offer.island!r} is to give the run's first parameters, and "
                f"differs from the coordinator: {text} (here: the coordinator's); "
                f"start both with one config"
            )
    elif ours and offer.run_id not in ("", ours):
        code = "run_id"
        why = (
            f"island {offer.island!r} is in run {offer.run_id}, and this coordinator "
            f"{'begins' if state.aim.first else 'gathers anchors of'} run {ours}; "
            f"check the coordinator's address"
        )
    elif offer.versions and not offer.run_id and not state.aim.first:
        code, why = "run_id", f"island {offer.island!r} offers anchors of no run"
    elif state.aim.known is not None and offer.term >= state.aim.term:
        code = "other_term"
        why = (
            f"island {offer.island!r} is in term {offer.term}, and this coordinator's "
            f"log ends in term {state.aim.term - 1}: its state is an old one"
        )
    elif (
        state.aim.last_name is not None
        and offer.term == state.aim.term - 1
        and offer.term_name != state.aim.last_name
    ):
        code = "other_term"
        why = (
            f"island {offer.island!r} is in term {offer.term} {offer.term_name!r}, and "
            f"this coordinator's log in term {offer.term} {state.aim.last_name!r}: "
            f"another coordinator of this run opened that one, with other values"
        )
    return Refused(code=code, message=why) if code else None


def other_process(before: Offering | None, offer: Hello) -> Refused | None:
    """Explain why a second process of an island that gives first parameters cannot give
    them too; None if it may."""
    if before is None or before.offer.incarnation != offer.incarnation:
        return None
    if before.offer.session == offer.session:
        return None
    return Refused(
        code="name_in_use",
        message=f"the name {offer.island!r} is in use by another process with the same "
        f"incarnation {offer.incarnation}; replace that process by starting "
        f"incarnation {offer.incarnation + 1}",
    )
