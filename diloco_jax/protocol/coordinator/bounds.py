"""Refuse deltas that are much longer than those of the other islands.

An island's delta may be `sync.delta_bound` times as long as is usual among the other
islands and for the island itself. The usual length is the upper median of their
lengths, or of their lengths per full step times the full steps of this delta if that is
more: both a random walk and a straight one are honest. There is no lower bound. So a
minority of the islands can neither bring in a long delta nor keep others out.

A delta is at most as long as the sum of its steps' learning rates, so these must be
comparable (docs/design/bounds.md):

- An island with fresh moments begins at small rates. A *full step* is worth
  `inner.rewarm_steps` of its first ones, and so on: see `full_steps`.
- The rate follows the run's progress, and rises in proportion to it at most. A delta
  is no measure once the progress is more than `MOST_GROWTH` times that at its take, or,
  if it is of an earlier tick, at its base.
- The rate falls at the end, and one island's delta may reach further back than the
  others' ones: its steps are worth as much more as the rate was higher since
  (`Fleet.fall`).

Deltas are judged when the fragment closes, so that deltas of one tick are compared. No
fragment waits for quarantined islands, so their deltas are judged as they arrive, and
held to every length that there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from diloco_jax.protocol.coordinator import ledger, takes
from diloco_jax.protocol.coordinator.events import Effect
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import Fragment, PolicyConfig
from diloco_jax.protocol.reasons import OUT_OF_BOUNDS, QUARANTINED, RefusalReason
from diloco_jax.protocol.values import Contribution

Step = tuple[Fragment, list[Effect]]

FEWEST = 2
"""Lengths without which nothing is usual."""
MOST_GROWTH = 2.0
"""Growth of the run's progress, and so of learning rates, since a delta's base, up to
which the delta is a measure. With islands of one number and speed, these are all deltas
of the cycle before, from a fragment's fourth merge on."""


class _Length(NamedTuple):
    norm: float
    per_step: float
    """Length per full step."""


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
    for delta in _ready(before, name):
        most = Usual(config, before, fleet, every=True).most(name, delta)
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

    def __init__(
        self,
        config: PolicyConfig,
        fragment: Fragment,
        fleet: Fleet,
        *,
        every: bool = False,
    ) -> None:
        """every: deltas of before are measures, whatever the progress since."""
        self._config, self._fragment, self._fleet = config, fragment, fleet
        self._every = every
        self._merged = ledger.merged_into(fragment)
        self._lengths: dict[str, _Length] = {}
        for name, account in fragment.accounts.items():
            # An absent island's delta that is ready is merged with the others.
            ready = account.take is not None and account.take.ready
            if fleet.is_quarantined(name) or not (ready or fleet.is_live(name)):
                continue
            for length in self._of_take(name) or self._of_last(name):
                self._lengths[name] = length

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
        per_step = _upper_median([length.per_step for length in usual])
        # What is open began after the base of the last delta, or with the run.
        since = self._fragment.accounts[name].base_tokens
        full_steps = self._full_steps(name, delta) * self._fleet.fall(since)
        return bound * max(norm, per_step * full_steps)

    def _of_take(self, name: str) -> list[_Length]:
        """Return the length of the island's delta that is ready, if it is a measure."""
        take = self._fragment.accounts[name].take
        if take is None or not take.ready or not take.norm:
            return []
        if take.tick >= self._fragment.tick:
            fit = self._fleet.progress <= MOST_GROWTH * take.progress
        else:
            tokens = ledger.tokens_at(self._fragment, take.base, self._merged)
            fit = self._is_measure(tokens)
        if not (fit or self._every):
            return []
        delta = takes.contribution(name, self._fragment.accounts[name], take)
        return [_Length(take.norm, take.norm / self._full_steps(name, delta))]

    def _of_last(self, name: str) -> list[_Length]:
        """Return the length of the island's last merged delta, if it is a measure."""
        account, last = (
            self._fragment.accounts[name],
            self._fragment.accounts[name].last,
        )
        if last is None or not last.norm:
            return []
        if not (self._every or self._is_measure(account.base_tokens)):
            return []
        return [_Length(last.norm, last.norm / self._full_steps(name, last))]

    def _is_measure(self, tokens: int) -> bool:
        """Tell whether a delta of before is a measure. tokens: those of its base."""
        return self._fleet.growth(tokens) <= MOST_GROWTH

    def _full_steps(self, name: str, delta: Contribution) -> float:
        return full_steps(delta.start, delta.end, self._fleet.rewarm_steps(name))


def full_steps(start: int, end: int, rewarm_steps: int) -> float:
    """Return the sum of min(1, (step + 1) / rewarm_steps) over an incarnation's steps
    [start, end): its learning rates, in units of those of an island that is not new."""

    def before(end: int) -> float:
        if not rewarm_steps:
            return float(end)
        rising = min(end, rewarm_steps)
        return end - rising + rising * (rising + 1) / (2 * rewarm_steps)

    return before(end) - before(start)


def _upper_median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
