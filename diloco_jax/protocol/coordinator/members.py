"""Who takes part: hellos, leases, incarnations, fencing.

An island is live while its reports come, absent while they do not, and gone when its
incarnation ended: by goodbye, or because a higher one said hello. Only the end of an
incarnation loses steps; an absent island that comes back has lost nothing. One that was
there before the coordinator lost its state is new to it, and goes on where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import asdict, replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import (
    admission,
    claims,
    fragments,
    leases,
    ledger,
    schedule,
    takes,
)
from diloco_jax.protocol.coordinator.events import (
    Disconnected,
    Effect,
    Forget,
    Note,
    Persist,
    RunResumed,
    Said,
    Tell,
)
from diloco_jax.protocol.coordinator.fleet import Fleet
from diloco_jax.protocol.coordinator.machines import ISLAND, ignored
from diloco_jax.protocol.coordinator.state import (
    Fragment,
    Island,
    PolicyConfig,
    State,
    with_fragment,
    with_island,
)
from diloco_jax.protocol.messages import Goodbye, Hello, Refused, Welcome
from diloco_jax.protocol.reasons import EndReason
from diloco_jax.protocol.values import DeltaKey, Outstanding

Step = tuple[State, list[Effect]]


def hello(config: PolicyConfig, state: State, event: Hello, now: float) -> Step:
    """Lets an island in, back in, or not."""
    refusal = admission.refusal(config, state, event)
    if refusal is not None:
        return state, turned_away(event.island, event.session, refusal)
    known = state.islands.get(event.island)
    if known is not None and known.incarnation == event.incarnation:
        if wrong := claims.wrong_hello(known, event):
            return put_out(state, known, wrong)
        return _resume(config, state, known, event, now)
    effects: list[Effect] = []
    if known is not None and known.status != "gone":
        state, effects = end(state, known.name, "died")
        fenced = Refused(
            code="fenced",
            message=f"island {known.name!r} is incarnation {event.incarnation} now, "
            f"this is {known.incarnation}; stop this process",
        )
        effects += turned_away(known.name, known.session, fenced)
    state, joined = _join(config, state, event, now)
    return state, effects + joined


def turned_away(island: str, session: str, refused: Refused) -> list[Effect]:
    """A session ends with this reason."""
    note = records.TurnedAway(island=island, code=refused.code, message=refused.message)
    return [Note(record=note), Tell(session=session, message=refused)]


def alive(config: PolicyConfig, state: State, island: Island, now: float) -> State:
    """The state with the island after a sign of life."""
    if island.status == "absent":
        state = schedule.reunite(config, state, now)
        status = ISLAND.move(island.status, "be heard")
        island = replace(schedule.restart(island), status=status)
    island = replace(island, lease_until=now + _lease_s(config, island))
    return with_island(state, island)


def disconnected(state: State, event: Disconnected) -> Step:
    """Its connection broke: it is not counted on until it is back."""
    island = state.islands.get(event.island)
    if island is None or island.session != event.session:
        return state, [ignored("island", "replaced", "disconnect")]
    if island.status != "live":
        return state, [ignored("island", island.status, "disconnect")]
    return _absent(state, island, "disconnected")


def goodbye(state: State, event: Said, said: Goodbye) -> Step:
    """The incarnation ends by its own word: what is here of its deltas stays."""
    island = state.islands.get(event.island)
    if island is None or island.session != event.session or island.status == "gone":
        return state, [ignored("island", "replaced", "goodbye")]
    for fragment in state.fragments:
        state = with_fragment(state, takes.leave_behind(fragment, event.island))
    return end(state, event.island, said.reason, said.text)


def expire(state: State, now: float) -> Step:
    """Islands whose lease ran out are absent."""
    effects: list[Effect] = []
    for island in state.islands.values():
        if island.status == "live" and now >= island.lease_until:
            state, notes = _absent(state, island, "silent")
            effects += notes
    return state, effects


def resumed(state: State, event: RunResumed) -> Step:
    """Ends every incarnation that was there when the run was stopped; islands come
    back, if at all, with higher ones."""
    effects: list[Effect] = []
    for name, island in state.islands.items():
        if island.status == "gone":
            continue
        reported = event.steps.get((name, island.incarnation), 0)
        island = replace(island, steps=max(island.steps, reported))
        state, found = end(with_island(state, island), name, "stopped")
        effects += found
    return state, effects


def put_out(state: State, island: Island, wrong: str) -> Step:
    """Ends an incarnation whose claims cannot be true. Nothing of the claim is booked;
    what was believed of it before stays."""
    message = admission.wrong_claim(island.name, island.incarnation, wrong)
    state, effects = end(state, island.name, "refused", message)
    refused = Refused(code="claims", message=message)
    return state, effects + turned_away(island.name, island.session, refused)


def end(state: State, name: str, reason: EndReason, said: str = "") -> Step:
    """Ends an incarnation: open steps are lost, data without effect is free again.
    said: at its goodbye; empty if there was none."""
    island = state.islands[name]
    settled = tuple(ledger.settled_steps(f, island) for f in state.fragments)
    merged_steps = leases.merged_steps(state, island)
    drops = [
        takes.drop(fragment, name)
        for fragment in state.fragments
        if fragment.accounts[name].take is not None
    ]
    state = ended(state, name, reason, settled, merged_steps)
    lost = (f.accounts[name].lost_tokens.get(reason, 0) for f in state.fragments)
    record = records.Left(
        island=name,
        incarnation=island.incarnation,
        steps=island.steps,
        reason=reason,
        said=said,
        settled_steps_by_fragment=settled,
        merged_steps=merged_steps,
        lost_tokens_by_fragment=tuple(lost),
        left_behind=tuple(
            records.LeftBehind(fragment=fragment.index, **asdict(kept))
            for fragment in state.fragments
            for kept in fragment.left_behind
            if (kept.island, kept.incarnation) == (name, island.incarnation)
        ),
    )
    return state, [Persist(record=record), *drops]


def ended(
    state: State,
    name: str,
    reason: EndReason,
    settled_steps: Sequence[int],
    merged_steps: int,
) -> State:
    """The state after an incarnation's end: also what recovery applies. Both counts of
    steps include the merges under way and what was left behind: `settled_steps` by
    fragment, `merged_steps` over all of them."""
    state = leases.release(state, name, merged_steps)
    island = state.islands[name]
    for fragment, settled in zip(state.fragments, settled_steps, strict=True):
        fragment = ledger.close_account(fragment, island, reason, settled)
        state = with_fragment(state, fragment)
    return with_island(state, replace(island, status=ISLAND.move(island.status, "end")))


def joined(state: State, island: Island, *, carrying: bool) -> State:
    """The state with a new incarnation in it: also what recovery applies. carrying: it
    began in an earlier term, whose progress its steps are part of already."""
    if carrying:
        own = island.steps * island.tokens_per_step
        state = replace(state, carried_progress=state.carried_progress - own)
    before = state.islands.get(island.name)
    if before is not None:
        island = replace(
            island, tokens_before=before.computed_tokens, joins=before.joins + 1
        )
    state = with_island(state, island)
    for fragment in state.fragments:
        opened = ledger.open_account(fragment, island, carrying=carrying)
        state = with_fragment(state, opened)
    return state


def _join(config: PolicyConfig, state: State, event: Hello, now: float) -> Step:
    carrying = admission.is_carrying(state, event)
    island = Island(
        name=event.island,
        incarnation=event.incarnation,
        session=event.session,
        tokens_per_step=event.tokens_per_step,
        sequences_per_step=event.sequences_per_step,
        step_seconds=event.step_seconds,
        lead=event.lead,
        phase=event.phase,
    )
    if carrying:
        island = replace(
            island,
            steps=event.steps,
            steps_at_tick=event.steps,
            sequences_granted=event.sequences_granted,
            records_through=event.records_through,
        )
    state = joined(state, island, carrying=carrying)
    state = alive(config, state, state.islands[event.island], now)
    carried = None
    if carrying:
        carried = records.Carrying(
            steps=event.steps, sequences_granted=event.sequences_granted
        )
    record = records.Joined(
        island=event.island,
        incarnation=event.incarnation,
        session=event.session,
        tokens_per_step=event.tokens_per_step,
        sequences_per_step=event.sequences_per_step,
        carried=carried,
    )
    effects: list[Effect] = [
        Persist(record=record),
        Forget(island=event.island, before=event.incarnation, kept=tuple(_kept(state))),
        _welcome(config, state, event, resumed=False),
    ]
    state, grants = leases.top_up(config, state, event.island)
    return state, effects + grants


def _resume(
    config: PolicyConfig, state: State, known: Island, event: Hello, now: float
) -> Step:
    name = event.island
    island = replace(
        known,
        steps=max(known.steps, event.steps),
        phase=event.phase,
        step_seconds=event.step_seconds or known.step_seconds,
        lead=event.lead,
        # A coordinator that came back has forgotten what is on its tape.
        records_through=max(known.records_through, event.records_through),
    )
    state = alive(config, state, island, now)
    effects: list[Effect] = [_welcome(config, state, event, resumed=True)]
    effects.append(
        Note(
            record=records.Resumed(
                island=name, incarnation=known.incarnation, steps=event.steps
            )
        )
    )
    effects += leases.regrant(state, name, event.sequences_granted)
    # A hello that comes late tells of takes in an earlier term, too.
    earlier = schedule.ticks_before(config, state.fragments[0].version.term)
    held = {take.fragment: take for take in event.outstanding if take.tick > earlier}
    fleet = Fleet(config, state)
    for fragment in state.fragments:
        outstanding = held.get(fragment.index)
        if outstanding is None:
            fragment, found = _ask_again(fragment, fleet, name)
        else:
            recorded = outstanding.seq <= island.records_through
            fragment, found = _reconcile(
                config, fragment, fleet, name, outstanding, now, recorded=recorded
            )
        state = with_fragment(state, fragment)
        effects += found
    return state, effects


def _ask_again(
    fragment: Fragment, fleet: Fleet, name: str
) -> tuple[Fragment, list[Effect]]:
    """The island holds no take of this fragment: a request may have got lost."""
    account = fragment.accounts[name]
    take = account.take
    if take is None or take.ready:
        return fragment, []
    if take.end is not None:
        # It gave the refused take up; the record that says how is on its way.
        return fragment, []
    return fragment, [fragments.request(fragment, fleet, name, take.tick)]


def _reconcile(
    config: PolicyConfig,
    fragment: Fragment,
    fleet: Fleet,
    name: str,
    held: Outstanding,
    now: float,
    *,
    recorded: bool,
) -> tuple[Fragment, list[Effect]]:
    """The island holds a take whose verdict it does not know. recorded: its record is
    on the tape; otherwise it comes with the next report, and nothing is merged before.
    """
    told = fragment.accounts[name].told
    if told is not None and told.tick == held.tick:
        verdict = takes.verdict_on(fragment, name, held.tick, told.verdict, told.reason)
        # The next request may have got lost together with the verdict.
        fragment, asks = _ask_again(fragment, fleet, name)
        return fragment, [verdict, *asks]
    effects: list[Effect] = []
    if recorded:
        fragment, effects = takes.known(config, fragment, name, held, now)
    take = fragment.accounts[name].take
    if take is None or take.tick != held.tick:
        return fragment, effects
    if take.refused:
        return fragment, effects or [
            takes.verdict_on(fragment, name, held.tick, "refused", take.refused)
        ]
    effects = effects or takes.pending(fragment, name)
    if not take.arrived:
        effects.append(takes.ask_to_resend(fragment, name, held.tick))
    return fragment, effects


def _kept(state: State) -> Iterator[DeltaKey]:
    """Deltas that stay although their incarnations ended: in a merge, or left behind
    for one."""
    for fragment in state.fragments:
        for delta in (*fragment.left_behind, *fragment.merging):
            yield DeltaKey(delta.island, delta.incarnation, fragment.index, delta.tick)


def _absent(state: State, island: Island, why: records.AbsentFor) -> Step:
    status = ISLAND.move(island.status, "fall silent")
    state = with_island(state, replace(island, status=status))
    record = records.Absent(island=island.name, incarnation=island.incarnation, why=why)
    return state, [Note(record=record)]


def _welcome(
    config: PolicyConfig, state: State, event: Hello, *, resumed: bool
) -> Tell:
    versions = tuple(fragment.version for fragment in state.fragments)
    welcome = Welcome(
        run_id=config.run_id,
        term=versions[0].term,
        resumed=resumed,
        versions=versions,
    )
    return Tell(session=event.session, message=welcome)


def _lease_s(config: PolicyConfig, island: Island) -> float:
    """Compiling and joining islands may be silent for longer."""
    if island.phase in ("joining", "compiling"):
        return max(config.compile_budget_s, config.lease_s)
    return config.lease_s
