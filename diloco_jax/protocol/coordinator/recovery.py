"""The state of the coordinator's half: after a crash, from durable records; as a new
term begins, from anchors that a search has found: the first state of a run whose log is
lost, or the records with which lost fragments go on in a log that is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from diloco_jax.protocol import messages, records
from diloco_jax.protocol.coordinator import (
    claims,
    ending,
    leases,
    ledger,
    members,
    schedule,
    takes,
)
from diloco_jax.protocol.coordinator.islands import GRANTS_AT_ONCE, NOBODY
from diloco_jax.protocol.coordinator.search import FoundTerm
from diloco_jax.protocol.coordinator.state import (
    FRAGMENT,
    ISLAND,
    RUN,
    Fragment,
    MergedTokens,
    PolicyConfig,
    State,
    initial,
    with_account,
    with_fragment,
    with_island,
)
from diloco_jax.protocol.holding import AnchorKept
from diloco_jax.protocol.messages import Span, Version


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
            complaints={},
            grants_left=GRANTS_AT_ONCE,
        )
        state = with_island(state, island)
    for fragment in state.fragments:
        fragment = ledger.lose_missing(state, fragment, "coordinator")
        state = with_fragment(state, fragment)
    state = replace(
        state,
        # An unfinished cycle is kept no further, and no island watches one.
        keeping=False,
        unkept=(),
        unwatched=(),
        absences=NOBODY,
        ahead=(),
    )
    state = schedule.after_crash(config, state)
    if state.phase in ("stopping", "flushing"):
        state = replace(state, phase=RUN.move(state.phase, "recover"))
    return serving_from(config, state, now)


def serving_from(config: PolicyConfig, state: State, now: float) -> State:
    """Return a recovered state whose coordinator begins to serve now: no island could
    come before, however long its fragments took to be restored."""
    for island in state.islands.values():
        island = replace(
            island,
            lease_until=now + config.lease_s,
            granted_at=now,
            wall_time=claims.unheard(config, island, now),
        )
        state = with_island(state, island)
    if state.phase in ("stopping", "flushing"):
        state = replace(state, deadline=now + config.flush_s)
    return replace(state, reunion_until=now)


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
                free_spans=messages.spans_without(state.free_spans, (span,)),
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
            return takes.quarantine_moved(state, record.island, quarantined=quarantined)
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
            return ledger.contributed(state, record.contributions)
        case records.TermBegun():
            return fragment_begun(state, record)
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


def first_state(config: PolicyConfig, found: FoundTerm) -> State:
    """Return the state of a run whose log is lost at the beginning of the term."""
    state = initial(config)
    for anchor in found.anchors:
        # Islands have the anchor under its old name until they adopt the new one.
        versions = (anchor.replaced, anchor.version)
        newest = tuple(MergedTokens(version=version) for version in versions)
        fragment = state.fragments[anchor.fragment]
        begun = replace(fragment, version=anchor.version, newest=newest)
        state = with_fragment(state, begun)
    tick = schedule.ticks_before(config, found.term)
    let_in = [n for n in found.offered if not members.unknown(config, n)]
    return replace(
        state,
        returning=tuple(let_in),
        tick=tick,
        ticks_reserved=tick,
        term=found.term,
        term_name=found.name,
        books=found.term,
        progress_tokens=found.tokens,
        carried_progress=found.tokens,
        next_position=found.next_position,
    )


def term_records(state: State, found: FoundTerm) -> list[records.TermBegun]:
    """Return the records with which lost fragments begin the run's next term."""
    return [
        records.TermBegun(
            island=anchor.island,
            incarnation=anchor.incarnation,
            fragment=anchor.fragment,
            version=anchor.version,
            name=found.name,
            replaced=anchor.replaced,
            lost_tokens=_merged_above(state.fragments[anchor.fragment], anchor),
            digest=anchor.digest,
        )
        for anchor in found.anchors
    ]


def fragment_begun(state: State, record: records.TermBegun) -> State:
    """Return the state once a lost fragment has begun a new term, as recovery applies
    it. What was merged into versions above the anchor's is lost; takes against them
    are stale, and their steps stay with the islands."""
    fragment = state.fragments[record.fragment]
    for name, tokens in record.lost_tokens.items():
        account = fragment.accounts[name]
        account = replace(account, merged_tokens=account.merged_tokens - tokens)
        account = account.lose_tokens(tokens, "worker")
        fragment = with_account(fragment, name, account)
    phase = FRAGMENT.move(FRAGMENT.move(fragment.phase, "recover"), "begin term")
    newest = tuple(m for m in fragment.newest if m.version <= record.replaced)
    fragment = replace(
        fragment,
        version=record.version,
        phase=phase,
        newest=(*newest, MergedTokens(version=record.version)),
    )
    state = with_fragment(state, fragment)
    return replace(state, term=record.version.term, term_name=record.name)


def versions_known(
    fragment: Fragment, digests: Mapping[Version, str]
) -> dict[Version, str]:
    """Return the versions after which the log knows all merges, for `Aim.known`.
    digests: of anchors, where the tape has them."""
    return {m.version: digests.get(m.version, "") for m in fragment.newest}


def _merged_above(fragment: Fragment, anchor: AnchorKept) -> dict[str, int]:
    lost: dict[str, int] = {}
    for merged in fragment.newest:
        if merged.version > anchor.replaced:
            for name, tokens in merged.by_island.items():
                lost[name] = lost.get(name, 0) + tokens
    return lost
