"""Whom a coordinator without its state believes: of islands that offer anchors, the run
of most, and claims that are not far above those of most.

If two islands differ, nobody can tell which is wrong: it takes three to disbelieve one.
After the state is lost, what islands heard becomes the run's, so a wrong claim would
spoil it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from diloco_jax.protocol.coordinator.events import Tell
from diloco_jax.protocol.messages import Hello, Refused
from diloco_jax.protocol.values import Version

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


def claims_of(offer: Hello) -> Known:
    """Return the values that an island claims to know."""
    return Known(
        term=max([offer.term, *(version.term for version in offer.versions)]),
        tokens=offer.tokens,
        next_position=offer.next_position,
        merges=max((version.number for version in offer.versions), default=0),
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
    ranked = Counter(run_ids).most_common(2)
    if len(ranked) == 2 and ranked[0][1] == ranked[1][1]:
        return ""
    return ranked[0][0] if ranked else ""


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


def disbelieved(offer: Hello, wrong: str) -> Tell:
    """Return the message to an island whose claims are not believed, for this
    reason."""
    return Tell(
        session=offer.session,
        message=Refused(
            code="claims",
            message=f"island {offer.island!r} is not believed as a new term begins: "
            f"{wrong}; start it again with incarnation {offer.incarnation + 1}",
        ),
    )


def listed(texts: list[str]) -> str:
    """Name some, and count the others."""
    more = len(texts) - MOST_NAMED
    return "; ".join([*texts[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])
