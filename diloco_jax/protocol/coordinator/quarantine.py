"""Refuse deltas that are much longer than those of the other islands, and quarantine an
island after too many unfit ones in a row.

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

Every refusal makes the island restart that fragment from its anchor, so a cycle later
nothing of its old values is left. The coordinator still asks a quarantined island for
its deltas and judges them, but merges none. It releases the island once all deltas of
`sync.release_cycles` cycles in a row were fit, or when an operator asks for it. A new
incarnation of a quarantined island is quarantined too.

A majority of the live islands is never quarantined: if most differ from the rest,
nobody can tell who is right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import takes
from diloco_jax.protocol.coordinator.events import Note
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import (
    Fragment,
    PolicyConfig,
    State,
    Turn,
    with_island,
)
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.values import (
    NON_FINITE,
    OUT_OF_BOUNDS,
    QUARANTINED,
    Contribution,
    RefusalReason,
)

FEWEST = 2
"""Lengths without which nothing is usual."""


class _Length(NamedTuple):
    norm: float
    per_rate: float
    """Length over the sum of the learning rates."""


def refuse_long(turn: Turn, fragment: Fragment, fleet: Fleet) -> Fragment:
    """Refuse the ready deltas that are out of bounds."""
    if not turn.config.delta_bound:
        return fragment
    before, usual = fragment, Usual(turn.config, fragment, fleet)
    for name in before.accounts:
        for delta in _ready(before, name):
            most = usual.most(name, delta)
            if delta.norm > most:
                fragment = _refuse(turn, fragment, delta, OUT_OF_BOUNDS, most)
    return fragment


def _refuse_quarantined(turn: Turn, fragment: Fragment, name: str) -> Fragment:
    """Refuse the ready deltas of a quarantined island.

    The reason says whether a delta is within bounds; enough of those in a row release
    the island.
    """
    before, fleet = fragment, Fleet(turn.config, turn.state)
    usual = Usual(turn.config, before, fleet)
    for delta in _ready(before, name):
        most = usual.most(name, delta)
        reason: RefusalReason = OUT_OF_BOUNDS if delta.norm > most else QUARANTINED
        fragment = _refuse(turn, fragment, delta, reason, most)
    return fragment


def _ready(fragment: Fragment, name: str) -> Iterator[Contribution]:
    """Yield the island's deltas that can be merged: its own, and one that an earlier
    incarnation left behind."""
    delta = takes.ready(fragment, name)
    if delta is not None and not takes.is_merging(fragment, name, delta.tick):
        yield delta
    yield from (old for old in fragment.left_behind if old.island == name)


def _refuse(
    turn: Turn,
    fragment: Fragment,
    delta: Contribution,
    reason: RefusalReason,
    most: float,
) -> Fragment:
    """most: the length that is allowed."""
    most = 0.0 if most == math.inf else most
    if any(delta is old for old in fragment.left_behind):
        return takes.refuse_left_behind(turn, fragment, delta, reason, most)
    return takes.refuse(turn, fragment, delta.island, reason, most)


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
        delta = takes.ready(self._fragment, name)
        return [] if delta is None else _length(delta)

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


def advance(turn: Turn) -> None:
    """Count the deltas that the step has judged; quarantine and release islands."""
    if not turn.config.quarantine_after:
        return
    for effect in tuple(turn.effects):
        match effect:
            case Note(record=records.DeltaRefused(reason=reason) as refused):
                if reason in (NON_FINITE, OUT_OF_BOUNDS):
                    _unfit(turn, refused)
                elif reason == QUARANTINED:
                    _fit(turn, refused)
            case Merge(contributions=contributions):
                for contribution in contributions:
                    island = turn.state.islands[contribution.island]
                    if island.streak and not island.quarantined:
                        turn.put(replace(island, streak=0))


def turn_away(turn: Turn) -> None:
    """Refuse the deltas that have arrived from quarantined islands, in every phase of
    their fragments.

    Nobody waits for these deltas, so they may come too late for a merge.
    """
    for name in turn.state.islands.standing.quarantined:
        for before in turn.state.fragments:
            take = before.accounts[name].take
            if not (before.left_behind or (take is not None and take.ready)):
                continue  # This is asked for each fragment after each event.
            fragment = _refuse_quarantined(turn, before, name)
            if fragment is not before:
                turn.put(fragment)


def moved(state: State, name: str, *, quarantined: bool) -> State:
    """Return the state with the island in quarantine, or out of it; recovery applies
    this too.
    """
    island = replace(state.islands[name], quarantined=quarantined, streak=0)
    return with_island(state, island)


def _unfit(turn: Turn, refused: records.DeltaRefused) -> None:
    name, config = refused.island, turn.config
    island = turn.state.islands[name]
    if island.quarantined:
        turn.put(replace(island, streak=0))
        return
    island = replace(island, streak=island.streak + 1)
    turn.put(island)
    if island.streak < config.quarantine_after or not _may_lack(turn.state):
        return
    turn.state = moved(turn.state, name, quarantined=True)
    turn.persist(
        records.Quarantined(
            island=name, incarnation=island.incarnation, refused=island.streak
        )
    )
    what = "is not finite"
    if refused.reason == OUT_OF_BOUNDS:
        what = f"has a length of {refused.norm:.3g}, but {refused.most:.3g} is allowed"
    turn.alert(
        f"island {name!r} is quarantined: {island.streak} of its deltas in a row were "
        f"unfit, and the last one, of fragment {refused.fragment}, {what}; it restarts "
        f"from the global parameters, and is merged again once its deltas are within "
        f"bounds for {config.release_cycles} cycles; look at its log, its data and its "
        f"machine",
        name,
    )


def _fit(turn: Turn, refused: records.DeltaRefused) -> None:
    island = turn.state.islands[refused.island]
    if not island.quarantined or _is_untold(turn.config, turn.state, refused):
        return
    island = replace(island, streak=island.streak + 1)
    turn.put(island)
    if island.streak >= turn.config.release_cycles * turn.config.fragments:
        release(turn, island)


def release(turn: Turn, island: Island, *, asked: bool = False) -> None:
    """End an island's quarantine. asked: an operator wants it."""
    name, fit = island.name, island.streak
    turn.state = moved(turn.state, name, quarantined=False)
    turn.persist(
        records.Released(
            island=name, incarnation=island.incarnation, fit=fit, asked=asked
        )
    )
    why = ", as an operator wanted" if asked else ""
    turn.alert(
        f"island {name!r} is out of quarantine after {fit} deltas in a row that were "
        f"within bounds{why}; its deltas are merged again",
        name,
    )


def _is_untold(
    config: PolicyConfig, state: State, refused: records.DeltaRefused
) -> bool:
    """Tell whether the delta cannot be judged yet: it came first, and the lengths of
    the others' deltas are still to come.
    """
    if not (config.delta_bound and refused.norm) or refused.most:
        return False
    fleet = state.islands.standing
    others = {*fleet.counted} - {*fleet.quarantined}
    return len(others) >= FEWEST


def _may_lack(state: State) -> bool:
    """Tell whether one more island in quarantine leaves most of the live ones."""
    fleet = state.islands.standing
    apart = {*fleet.live} & {*fleet.quarantined}
    return 2 * (len(apart) + 1) < len(fleet.live)
