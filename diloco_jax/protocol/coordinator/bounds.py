"""Refuse deltas that are much longer than those of the other islands.

An island's delta may be `sync.delta_bound` times as long as is usual among the other
islands and for the island itself. The usual length is the upper median of their
lengths, or of their lengths per step times the steps of this delta if that is more:
both a random walk and a straight one are honest. An island's length is that of its
delta that is ready now, or else of its last merge of the fragment. There is no lower
bound. So a minority of the islands can neither bring in a long delta nor keep others
out.

Deltas are judged when the fragment closes, so that deltas of one moment are compared:
the learning rate warms up for all islands alike. No fragment waits for quarantined
islands, so their deltas are judged as they arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from diloco_jax.protocol.coordinator import takes
from diloco_jax.protocol.coordinator.events import Effect
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import Fragment, PolicyConfig
from diloco_jax.protocol.reasons import OUT_OF_BOUNDS, QUARANTINED, RefusalReason
from diloco_jax.protocol.values import Contribution

Step = tuple[Fragment, list[Effect]]

FEWEST = 2
"""Lengths without which nothing is usual."""
SETTLED_MERGES = 3
"""Merges of a fragment after which earlier lengths count: the first ones are those of a
learning rate near 0."""


class _Length(NamedTuple):
    norm: float
    steps: int


def refuse(config: PolicyConfig, fragment: Fragment, fleet: Fleet) -> Step:
    """Refuse the ready deltas that are out of bounds."""
    before, effects = fragment, list[Effect]()
    if not config.delta_bound:
        return fragment, effects
    for name in before.accounts:
        for delta in _ready(before, name):
            most = _most(config, before, fleet, name, delta)
            if delta.norm > most:
                fragment, found = _refuse(fragment, name, delta, OUT_OF_BOUNDS, most)
                effects += found
    return fragment, effects


def turn_away(
    config: PolicyConfig, fragment: Fragment, fleet: Fleet, name: str
) -> Step:
    """Refuse the ready deltas of a quarantined island.

    The reason says whether a delta is within bounds; enough of those in a row release
    the island.
    """
    before, effects = fragment, list[Effect]()
    for delta in _ready(before, name):
        most = _most(config, before, fleet, name, delta)
        reason: RefusalReason = OUT_OF_BOUNDS if delta.norm > most else QUARANTINED
        fragment, found = _refuse(fragment, name, delta, reason, most)
        effects += found
    return fragment, effects


def _ready(fragment: Fragment, name: str) -> Iterator[Contribution]:
    """Yield the island's deltas that can be merged: its own, and one that an earlier
    incarnation left behind."""
    account = fragment.accounts[name]
    take = account.take
    if (
        take is not None
        and take.ready
        and not takes.is_merging(fragment, name, take.tick)
    ):
        yield takes.contribution(name, account, take)
    yield from (old for old in fragment.left_behind if old.island == name)


def _refuse(
    fragment: Fragment,
    name: str,
    delta: Contribution,
    reason: RefusalReason,
    most: float,
) -> Step:
    """most: the length that is allowed."""
    most = 0.0 if most == math.inf else most
    if any(delta is old for old in fragment.left_behind):
        return takes.refuse_left_behind(fragment, delta, reason, most)
    return takes.refuse(fragment, name, reason, most)


def _most(
    config: PolicyConfig,
    fragment: Fragment,
    fleet: Fleet,
    name: str,
    delta: Contribution,
) -> float:
    """Return the length allowed to a delta of the island; infinity if too little is
    known of the others."""
    if not config.delta_bound or not delta.norm:
        return math.inf
    # A quarantined island is held to every length that there is.
    early = fragment.merges < SETTLED_MERGES and not fleet.is_quarantined(name)
    known = [] if early else [_last(fragment, name)]
    for other, account in fragment.accounts.items():
        if other == name or fleet.is_quarantined(other):
            continue
        # An absent island's delta that is ready is merged with the others.
        ready = account.take is not None and account.take.ready
        if ready or fleet.is_live(other):
            known.append(_newest(fragment, other, early=early))
    usual = [length for length in known if length.norm and length.steps]
    if len(usual) < FEWEST:
        return math.inf
    norm = _upper_median([length.norm for length in usual])
    rate = _upper_median([length.norm / length.steps for length in usual])
    return config.delta_bound * max(norm, rate * delta.steps)


def _newest(fragment: Fragment, name: str, *, early: bool) -> _Length:
    """Return the length of the island's delta that is ready, or else of its last
    merged one. early: those from before the last tick do not count, and are 0."""
    take = fragment.accounts[name].take
    if take is None or not take.ready or take.end is None:
        return _Length(0.0, 0) if early else _last(fragment, name)
    if early and take.tick < fragment.tick:
        return _Length(0.0, 0)
    return _Length(take.norm, take.end - take.start)


def _last(fragment: Fragment, name: str) -> _Length:
    account = fragment.accounts[name]
    return _Length(account.norm, account.norm_steps)


def _upper_median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
