"""Data leases: which island may train on which positions of the global index.

Positions are granted once. When the incarnation that holds them ends, the positions of
steps that are in no merge return to the pool.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.events import Effect, Persist, Tell
from diloco_jax.protocol.coordinator.state import (
    FIRST_LEASE_STEPS,
    GRANTS_AT_ONCE,
    SHORTEST_STEP_S,
    Island,
    Lease,
    PolicyConfig,
    State,
    with_island,
)
from diloco_jax.protocol.messages import Granted
from diloco_jax.protocol.values import Span

RATE_MARGIN = 4
"""Steps per second that are believed, as a multiple of what the island's step time
allows."""
UNKNOWN_STEP_S = 0.01
"""Step time of an island that has not told its own, as far as its rate is bounded."""


def top_up(
    config: PolicyConfig, state: State, name: str, now: float
) -> tuple[State, list[Effect]]:
    """Grant data until the island holds enough for `outage_budget_s` at its speed.

    An island that uses data much faster than its step time allows gets it later. The
    data that it holds thus bounds the steps that it can claim.
    """
    island = state.islands[name]
    # One durable record serves an outage budget's worth of steps.
    most = largest_grant(config, island.step_seconds, island.sequences_per_step)
    wanted = most // 2
    held = island.sequences_granted - island.steps * island.sequences_per_step
    effects: list[Effect] = []
    if held >= wanted:
        return state, effects
    missing = most - held
    step_s = max(island.step_seconds or UNKNOWN_STEP_S, SHORTEST_STEP_S)
    used_since = RATE_MARGIN * (now - island.granted_at) / step_s
    grants_left = island.grants_left + used_since * island.sequences_per_step / most
    grants_left = min(grants_left, GRANTS_AT_ONCE) - missing / most
    if grants_left < 0:
        return state, effects
    island = replace(island, granted_at=now, grants_left=grants_left)
    state = with_island(state, island)
    while missing > 0:
        span, state = _draw(state, missing)
        missing -= span.stop - span.start
        state, granted = _grant(state, name, span)
        effects += granted
    return state, effects


def largest_grant(
    config: PolicyConfig, step_seconds: float, sequences_per_step: int
) -> int:
    """Return the sequences granted at once to an island of that speed that holds none:
    twice the amount that it should hold."""
    steps = FIRST_LEASE_STEPS
    if step_seconds > 0:
        step_seconds = max(step_seconds, SHORTEST_STEP_S)
        steps = math.ceil(config.outage_budget_s / step_seconds) + 1
    return 2 * steps * sequences_per_step


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


def _grant(state: State, name: str, span: Span) -> tuple[State, list[Effect]]:
    island = state.islands[name]
    offset = island.sequences_granted
    state = granted(state, name, span)
    record = records.Granted(
        island=name,
        incarnation=island.incarnation,
        start=span.start,
        stop=span.stop,
        offset=offset,
    )
    message = Granted(span=span, offset=offset)
    return state, [
        Persist(record=record),
        Tell(session=island.session, message=message),
    ]


def granted(state: State, name: str, span: Span) -> State:
    """Return the state after a grant; recovery applies it too."""
    island = state.islands[name]
    kept = _unsettled_leases(state, island)
    lease = Lease(offset=island.sequences_granted, span=span)
    return with_island(
        state,
        replace(
            island,
            leases=(*kept, lease),
            sequences_granted=island.sequences_granted + span.stop - span.start,
        ),
    )


def release(state: State, name: str, merged_steps: int) -> State:
    """Free the positions of an ended incarnation's steps after `merged_steps`."""
    island = state.islands[name]
    left = _left(island, merged_steps)
    spans = [*state.free_spans, *(span for span in left if span.start < span.stop)]
    state = replace(state, free_spans=_joined(spans))
    return with_island(state, replace(island, leases=()))


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
    found, at = [], 0
    for span in sorted(without):
        if span.start > at:
            found.append(Span(at, span.start))
        at = max(at, span.stop)
    if at < state.next_position:
        found.append(Span(at, state.next_position))
    return found


def regrant(state: State, name: str, known: int) -> list[Effect]:
    """Repeat the grants after the first `known` sequences to a returned incarnation."""
    island = state.islands[name]
    return [
        Tell(
            session=island.session,
            message=Granted(span=lease.span, offset=lease.offset),
        )
        for lease in island.leases
        if lease.offset >= known
    ]


def merged_steps(state: State, island: Island) -> int:
    """Return the incarnation's steps up to the last one that may be in some merge,
    merges under way and deltas left behind included."""
    ends = []
    for fragment in state.fragments:
        ends.append(fragment.accounts[island.name].merged_end)
        ends += [
            contribution.end
            for contribution in (*fragment.merging, *fragment.left_behind)
            if contribution.island == island.name
            and contribution.incarnation == island.incarnation
        ]
    return max(ends)


def _unsettled_leases(state: State, island: Island) -> tuple[Lease, ...]:
    settled = merged_steps(state, island) * island.sequences_per_step
    return tuple(
        lease
        for lease in island.leases
        if lease.offset + lease.span.stop - lease.span.start > settled
    )


def _joined(spans: list[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and joined[-1].stop == span.start:
            joined[-1] = Span(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)
