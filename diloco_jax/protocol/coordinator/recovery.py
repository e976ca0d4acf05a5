"""Recovery: the state of the coordinator's half after a crash, from durable records."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from diloco_jax.protocol import records, values
from diloco_jax.protocol.coordinator import (
    claims,
    ending,
    leases,
    ledger,
    members,
    quarantine,
    schedule,
    terms,
)
from diloco_jax.protocol.coordinator.islands import GRANTS_AT_ONCE, NOBODY
from diloco_jax.protocol.coordinator.state import (
    FRAGMENT,
    ISLAND,
    RUN,
    PolicyConfig,
    State,
    with_fragment,
    with_island,
)
from diloco_jax.protocol.values import Span


def recover(
    config: PolicyConfig,
    snapshot: State,
    log: Iterable[records.Durable],
    now: float,
) -> State:
    """Rebuild the state after a crash from a snapshot and the log's records after it.
    Every island is absent until it says hello. Requests and deltas in transit are
    forgotten, and return with the hellos."""
    state = snapshot
    for record in log:
        state = _replayed(state, record)
    for fragment in state.fragments:
        fragment = replace(
            fragment,
            phase=FRAGMENT.move(fragment.phase, "recover"),
            asked=(),
            merging=(),
            left_behind=(),
            accounts={
                name: replace(account, take=None)
                for name, account in fragment.accounts.items()
            },
        )
        state = with_fragment(state, fragment)
    state = leases.free_departed(state)
    for island in state.islands.values():
        steps = max(
            [island.steps, *(f.accounts[island.name].start for f in state.fragments)]
        )
        island = replace(
            island,
            status=ISLAND.move(island.status, "recover"),
            phase="training" if steps else island.phase,
            steps=steps,
            steps_at_tick=steps,
            records_through=0,
            streak=0,
            lease_until=now + config.lease_s,
            granted_at=now,
            grants_left=GRANTS_AT_ONCE,
        )
        island = replace(island, wall_time=claims.unheard(config, island, now))
        state = with_island(state, island)
    for fragment in state.fragments:
        fragment = ledger.lose_missing(state, fragment, "coordinator")
        state = with_fragment(state, fragment)
    state = replace(
        state,
        reunion_until=now,
        # An unfinished cycle is kept no further, and no island watches one.
        keeping=False,
        unkept=(),
        unwatched=(),
        absences=NOBODY,
        ahead=(),
    )
    state = schedule.after_crash(config, state)
    if state.phase in ("stopping", "flushing"):
        state = replace(
            state,
            phase=RUN.move(state.phase, "recover"),
            deadline=now + config.flush_s,
        )
    return state


def _replayed(state: State, record: records.Durable) -> State:
    match record:
        case records.Joined():
            return members.joined(state, members.island_of(record), record.carried)
        case records.Carried():
            fragment = state.fragments[record.fragment]
            fragment = ledger.carry(fragment, record.island, record.steps)
            return with_fragment(state, fragment)
        case records.Granted():
            span = Span(record.start, record.stop)
            state = leases.granted_again(state, span)
            state = replace(
                state,
                next_position=max(state.next_position, span.stop),
                free_spans=values.spans_without(state.free_spans, (span,)),
            )
            return leases.granted(state, record.island, span)
        case records.Left():
            island = state.islands[record.island]
            steps = max(island.steps, record.steps)
            state = with_island(state, replace(island, steps=steps))
            return members.ended(
                state,
                record.island,
                record.reason,
                record.settled_steps_by_fragment,
                record.in_merges,
            )
        case records.Quarantined() | records.Released():
            quarantined = isinstance(record, records.Quarantined)
            return quarantine.moved(state, record.island, quarantined=quarantined)
        case records.Admitted() | records.Removed():
            admitted = isinstance(record, records.Admitted)
            return members.with_admitted(state, record.island, admitted=admitted)
        case records.Merged():
            fragment = state.fragments[record.fragment]
            fragment = ledger.merge(fragment, record.contributions, record.version)
            fragment = replace(
                fragment, tick=record.tick, phase="idle", final=record.final
            )
            state = replace(state, tick=max(state.tick, record.tick))
            state = with_fragment(state, fragment)
            return leases.contributed(state, record.contributions)
        case records.TermBegun():
            return terms.fragment_begun(state, record)
        case records.Ticks(through=through):
            return replace(state, ticks_reserved=through)
        case records.Stopping(tokens=tokens):
            phase = RUN.move(state.phase, "stop")
            return replace(state, phase=phase, progress_tokens=tokens)
        case records.Finished():
            if state.phase == "stopping":
                state = replace(state, phase=RUN.move(state.phase, "flush"))
            return replace(state, phase=RUN.move(state.phase, "finish"))
        case records.Extended():
            return ending.extended(state)
