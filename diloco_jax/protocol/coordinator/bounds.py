"""Refuse deltas that are much longer than those of the other islands.

An honest delta is at most as long as its steps' learning rates allow: their sum, times
the length of an update at rate 1 (docs/design/bounds.md). So an island's delta may be
`sync.delta_bound` times as long as is usual among the other islands and for the island
itself. The usual length is the upper median of their lengths, or of their lengths over
their sums of rates times the sum of this delta if that is more: both a random walk and
a straight one are honest. There is no lower bound. So a minority of the islands can
neither bring in a long delta nor keep others out.

Each island says the sum of its rates with its take. No more is believed than its steps
at the highest rate that the run's schedule had since its last merge.

Deltas are judged when the fragment closes, so that deltas of one tick are compared. No
fragment waits for quarantined islands, so their deltas are judged as they arrive.
"""

from __future__ import annotations

import functools
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


class _Length(NamedTuple):
    norm: float
    per_rate: float
    """Length over the sum of the learning rates."""


def refuse(config: PolicyConfig, fragment: Fragment, fleet: Fleet) -> Step:
    """Refuse the ready deltas that are out of bounds."""
    before, effects = fragment, list[Effect]()
    if not config.delta_bound:
        return fragment, effects
    usual = Usual(config, before, fleet)
    for name in before.accounts:
        for delta in _ready(before, name):
            most = usual.most(name, delta)
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
    usual = Usual(config, before, fleet)
    for delta in _ready(before, name):
        most = usual.most(name, delta)
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


class Usual:
    """The lengths of one fragment's deltas, to which others are held."""

    def __init__(self, config: PolicyConfig, fragment: Fragment, fleet: Fleet) -> None:
        self._config, self._fragment, self._fleet = config, fragment, fleet

    @functools.cached_property
    def _lengths(self) -> dict[str, _Length]:
        """The islands' lengths that count, by name."""
        found, fleet = {}, self._fleet
        for name, account in self._fragment.accounts.items():
            # An absent island's delta that is ready is merged with the others.
            ready = account.take is not None and account.take.ready
            if name in fleet.quarantined or not (ready or fleet.is_live(name)):
                continue
            for length in self._of_take(name) or self._of_last(name):
                found[name] = length
        return found

    def most(self, name: str, delta: Contribution) -> float:
        """Return the length allowed to a delta of the island; infinity if too little is
        known of the others."""
        bound = self._config.delta_bound
        if not bound or not delta.norm:
            return math.inf
        usual = [length for other, length in self._lengths.items() if other != name]
        usual += self._of_last(name)
        if len(usual) < FEWEST:
            return math.inf
        norm = _upper_median([length.norm for length in usual])
        per_rate = _upper_median([length.per_rate for length in usual])
        return bound * max(norm, per_rate * self._believed(name, delta))

    def _believed(self, name: str, delta: Contribution) -> float:
        """Return the sum of the learning rates that is believed of the delta."""
        # What is open began after the base of the last delta, or with the run.
        since = self._fragment.accounts[name].base_tokens
        return min(delta.rate_sum, delta.steps * self._fleet.highest_rate(since))

    def _of_take(self, name: str) -> list[_Length]:
        """Return the length of the island's delta that is ready, if it is known."""
        account = self._fragment.accounts[name]
        take = account.take
        if take is None or not take.ready:
            return []
        return _length(takes.contribution(name, account, take))

    def _of_last(self, name: str) -> list[_Length]:
        """Return the length of the island's last merged delta, if it is known."""
        last = self._fragment.accounts[name].last
        return [] if last is None else _length(last)


def _length(delta: Contribution) -> list[_Length]:
    if not (delta.norm and delta.rate_sum):
        return []
    return [_Length(delta.norm, delta.norm / delta.rate_sum)]


def _upper_median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
