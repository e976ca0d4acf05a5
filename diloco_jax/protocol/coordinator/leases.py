"""Data leases: which island may train on which positions of the global index.

Positions are granted once. When the incarnation that holds them ends, the positions of
steps that are in no fragment's merge return to the pool. Those of steps whose deltas
may still be merged return when the last of these is given up.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from diloco_jax.protocol import messages, records
from diloco_jax.protocol.coordinator.islands import (
    FIRST_LEASE_STEPS,
    GRANTS_AT_ONCE,
    Departed,
    Island,
    Lease,
)
from diloco_jax.protocol.coordinator.state import (
    PolicyConfig,
    State,
    Turn,
    with_island,
)
from diloco_jax.protocol.messages import Granted, Span

RATE_MARGIN = 4
"""Steps per second that are believed, as a multiple of what the island's step time
allows."""
MOST_LEASES = 1000
"""Leases that are remembered of an incarnation. Steps that were lost in all fragments,
amid merged ones, add to them. Such steps of older leases do not come again."""
LARGEST_GRANTS_UNHEARD = 2
"""Grants to each island that no offering island may have heard of as a new term begins:
a grant lasts for an outage budget, so two between an offering island's last report and
the coordinator's end are unlikely."""
UNKNOWN_STEP_S = 0.01
"""Step time of an island that has not told its own, as far as its rate is bounded."""


def top_up(turn: Turn, name: str) -> None:
    """Grant data until the island holds enough for `outage_budget_s` at its speed.

    An island that uses data much faster than its step time allows gets it later.
    """
    island = turn.state.islands[name]
    # One durable record serves an outage budget's worth of steps.
    most = largest_grant(turn.config, island.step_seconds, island.sequences_per_step)
    held = island.sequences_granted - island.steps * island.sequences_per_step
    if held >= most // 2:
        return
    missing = most - held
    step_s = island.step_seconds or UNKNOWN_STEP_S
    used_since = RATE_MARGIN * (turn.now - island.granted_at) / step_s
    grants_left = island.grants_left + used_since * island.sequences_per_step / most
    grants_left = min(grants_left, GRANTS_AT_ONCE) - missing / most
    if grants_left < 0:
        return
    turn.put(replace(island, granted_at=turn.now, grants_left=grants_left))
    while missing > 0:
        span, turn.state = _draw(turn.state, missing)
        missing -= span.stop - span.start
        _grant(turn, name, span)


def largest_grant(
    config: PolicyConfig, step_seconds: float, sequences_per_step: int
) -> int:
    """Return the sequences granted at once to an island of that speed that holds none:
    twice the amount that it should hold. step_seconds: as believed; 0: unknown."""
    steps = FIRST_LEASE_STEPS
    if step_seconds > 0:
        steps = math.ceil(config.outage_budget_s / step_seconds) + 1
    return 2 * steps * sequences_per_step


def most_unheard(
    config: PolicyConfig, step_seconds: float, sequences_per_step: int
) -> int:
    """Return the sequences that an island of that speed may have been granted without
    anybody else's having heard of it."""
    # The first grant goes by no speed.
    speeds = (0.0, step_seconds)
    largest = max(largest_grant(config, s, sequences_per_step) for s in speeds)
    return LARGEST_GRANTS_UNHEARD * largest


def _draw(state: State, sequences: int) -> tuple[Span, State]:
    if state.free_spans:
        span, *rest = state.free_spans
        used = Span(span.start, min(span.stop, span.start + sequences))
        if used.stop < span.stop:
            rest.insert(0, Span(used.stop, span.stop))
        return used, replace(state, free_spans=tuple(rest))
    start = state.next_position
    state = replace(state, next_position=start + sequences)
    return Span(start, start + sequences), state


def _grant(turn: Turn, name: str, span: Span) -> None:
    island = turn.state.islands[name]
    offset = island.sequences_granted
    turn.state = granted(turn.state, name, span)
    turn.persist(records.Granted(**island.who, **span._asdict(), offset=offset))
    turn.tell(island.session, Granted(span=span, offset=offset))


def granted(state: State, name: str, span: Span) -> State:
    """Return the state after a grant; recovery applies it too."""
    island = state.islands[name]
    size, merged = island.sequences_per_step, state.in_merges[name]
    kept = [lease for lease in island.leases if _outside((lease,), merged, size)]
    lease = Lease(offset=island.sequences_granted, span=span)
    return with_island(
        state,
        replace(
            island,
            leases=(*kept, lease)[-MOST_LEASES:],
            sequences_granted=island.sequences_granted + span.stop - span.start,
        ),
    )


def perhaps_merged(state: State, island: Island) -> tuple[Span, ...]:
    """Return the incarnation's steps that are in a merge, merges under way and deltas
    left behind included."""
    pending = _pending(state, island.name, island.incarnation)
    return messages.join_spans((*state.in_merges[island.name], *pending))


def release(state: State, name: str, kept: Sequence[Span]) -> State:
    """Free the positions of an ended incarnation's steps but for `kept`. Those of them
    that are in no merge yet wait for `free_departed`."""
    island = state.islands[name]
    size, merged = island.sequences_per_step, state.in_merges[name]
    free = _outside(island.leases, kept, size)
    state = replace(state, free_spans=messages.join_spans((*state.free_spans, *free)))
    waiting = messages.spans_without(_outside(island.leases, merged, size), free)
    leases = [part for lease in island.leases for part in _cut(lease, waiting)]
    if leases:
        ended = Departed(
            **island.who,
            sequences_per_step=size,
            leases=tuple(leases),
            in_merges=merged,
        )
        state = replace(state, departed=(*state.departed, ended))
    return with_island(state, replace(island, leases=()))


def free_departed(state: State) -> State:
    """Free what is in no merge of incarnations of which no delta is left."""
    for ended in state.departed:
        if not _pending(state, ended.island, ended.incarnation):
            state = _forget(state, ended)
    return state


def granted_again(state: State, span: Span) -> State:
    """Free all that departed incarnations had, if they had a part of `span`: it was
    granted again, so none of their deltas was left."""
    for ended in state.departed:
        free = _outside(ended.leases, ended.in_merges, ended.sequences_per_step)
        if messages.common_spans((span,), free):
            state = _forget(state, ended)
    return state


def _forget(state: State, ended: Departed) -> State:
    free = _outside(ended.leases, ended.in_merges, ended.sequences_per_step)
    return replace(
        state,
        departed=tuple(other for other in state.departed if other is not ended),
        free_spans=messages.join_spans((*state.free_spans, *free)),
    )


def _pending(state: State, name: str, incarnation: int) -> list[Span]:
    """Return the steps of an incarnation's deltas in merges under way, and of those
    that it left behind."""
    return [
        Span(c.start, c.end)
        for fragment in state.fragments
        for c in (*fragment.merging, *fragment.left_behind)
        if (c.island, c.incarnation) == (name, incarnation)
    ]


def _outside(
    leases: Iterable[Lease], merged: Sequence[Span], sequences_per_step: int
) -> tuple[Span, ...]:
    """Return the positions in the leases whose steps are not in `merged`, which is
    sorted and disjoint. Where adoptions lose steps, that is a span for each merge."""
    found: list[Span] = []
    for lease in leases:
        shift = lease.span.start - lease.offset
        low = bisect.bisect_left(
            merged, lease.offset, key=lambda span: span.stop * sequences_per_step
        )
        high = bisect.bisect_left(
            merged,
            lease.span.stop - shift,
            low,
            key=lambda span: span.start * sequences_per_step,
        )
        taken = (
            Span(a * sequences_per_step + shift, b * sequences_per_step + shift)
            for a, b in merged[low:high]
        )
        found += messages.spans_without((lease.span,), taken)
    return messages.join_spans(found)


def _cut(lease: Lease, positions: Iterable[Span]) -> Iterable[Lease]:
    """Yield leases of the part that is in `positions`."""
    for part in messages.common_spans((lease.span,), positions):
        yield Lease(offset=lease.offset + part.start - lease.span.start, span=part)


def _left(island: Island, steps: int) -> list[Span]:
    """Return what the first steps of the incarnation leave of each lease."""
    used = steps * island.sequences_per_step
    return [
        Span(min(max(span.start, span.start + used - offset), span.stop), span.stop)
        for offset, span in ((lease.offset, lease.span) for lease in island.leases)
    ]


def trained(state: State) -> list[Span]:
    """Return the positions below `next_position` whose steps an island has reported,
    and that have not come back since: those that the run has trained on."""
    without = list(state.free_spans)
    for island in state.islands.values():
        without += _left(island, island.steps)
    return list(
        messages.spans_without(
            (Span(0, state.next_position),), messages.join_spans(without)
        )
    )


def regrant(turn: Turn, island: Island, known: int) -> None:
    """Repeat the grants after the first `known` sequences to a returned incarnation."""
    for lease in island.leases:
        if lease.offset >= known:
            turn.tell(island.session, Granted(span=lease.span, offset=lease.offset))
