"""Disbelieve an island that claims far more than most others.

After the state is lost, anchors and news of the islands become the run's, so a wrong
claim would spoil it. If two islands differ, nobody can tell which is wrong: it takes
three to disbelieve one.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from typing import NamedTuple

from diloco_jax.protocol.coordinator.events import Tell
from diloco_jax.protocol.messages import Hello, Refused
from diloco_jax.protocol.values import Version

FEWEST = 3
FAR = 2
"""Claims up to this multiple of the median are believed: an island may have been away
for long."""
TERMS_AHEAD = 16
MERGES_AHEAD = 100
POSITIONS_AHEAD = 2**20
SHARE_AHEAD = 0.01
"""Share of the run's tokens. These are believed in any case: a young run's medians are
small."""


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


def of_offer(offer: Hello) -> Known:
    """Return the values that an island claims to know."""
    return Known(
        term=max([offer.term, *(version.term for version in offer.versions)]),
        tokens=offer.tokens,
        next_position=offer.next_position,
        merges=max((version.number for version in offer.versions), default=0),
    )


def limits(claims: Collection[Known], total_tokens: int) -> Known | None:
    """Return the highest values that are believed; None if too few islands claim any.

    claims: those of the islands that offer anchors.
    """
    if len(claims) < FEWEST:
        return None
    medians = map(statistics.median_low, zip(*claims, strict=True))
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


def may_have_become(offered: Version, arrived: Version) -> bool:
    """Tell whether an anchor that was offered at one version may arrive at another.

    The island may have adopted a publish that was on its way.
    """
    ahead = arrived.number - offered.number
    return arrived.term == offered.term and 0 <= ahead <= MERGES_AHEAD
