"""The coordinator's half: its decisions, as one pure function of events and time.

`step(config, state, event, now) -> (state, effects)`; the service and the virtual-time
simulator both drive it. `next_deadline` says when a `Timer` is due;
`recovery.recover` rebuilds the state from durable records.

Phases of a run: running -> stopping (islands end their steps) -> flushing (open steps
are merged without a quorum, until a deadline) -> done, and running again if the run is
extended.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import (
    alerts,
    claims,
    cycles,
    ending,
    fragments,
    leases,
    ledger,
    members,
    quarantine,
    schedule,
    steering,
    takes,
)
from diloco_jax.protocol.coordinator.events import (
    Disconnected,
    Effect,
    Event,
    KeepAsked,
    MachineSlept,
    Note,
    Persist,
    RunExtended,
    RunResumed,
    Said,
    SaidAhead,
    Tell,
    Timer,
)
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import (
    RUN,
    Fragment,
    PolicyConfig,
    State,
    ignored,
    with_fragment,
)
from diloco_jax.protocol.holding import (
    CycleKept,
    DeltaArrived,
    MergePrepared,
)
from diloco_jax.protocol.messages import (
    Goodbye,
    Hello,
    Progress,
    Refused,
    Report,
    Steer,
    Stop,
    Welcome,
)
from diloco_jax.protocol.values import BEGINNING, Record

Step = tuple[State, list[Effect]]


def step(config: PolicyConfig, state: State, event: Event, now: float) -> Step:
    """Apply one event at time `now` (monotonic seconds)."""
    before = state = ending.awake(config, state, now)
    match event:  # Most events are reports.
        case Said(message=Report() as report):
            state, effects = _report(config, state, event, report, now)
        case SaidAhead():
            state, effects = members.ahead(config, state, event)
        case Hello():
            state, effects = members.hello(config, state, event, now)
            if state.phase != "running" and _is_welcome(effects):
                effects.append(Tell(session=event.session, message=Stop()))
        case Said(message=Goodbye() as goodbye):
            state, effects = members.goodbye(state, event, goodbye)
        case Disconnected():
            state, effects = members.disconnected(state, event)
        case RunResumed():
            state, effects = members.resumed(state, event)
        case RunExtended():
            state, effects = ending.extend(config, state)
        case Steer():
            state, effects = steering.steer(config, state, event)
        case KeepAsked():
            state, effects = cycles.ask(config, state)
        case CycleKept():
            state, effects = cycles.kept(state, event), []
        case DeltaArrived():
            state, effects = _arrived(config, state, event, now)
        case MergePrepared():
            state, effects = fragments.prepared(config, state, event, now)
            if now < state.deadline:  # Later steps of who is in it are yet to come.
                state = _waits_longer(config, state, now)
        case MachineSlept(seconds=seconds):
            state, effects = claims.slept(state, seconds), []
        case Timer():
            effects = []
    state, expired = members.expire(state, now, ending.late_s(config, state))
    state, turned = quarantine.turn_away(config, state)
    state, moved = _advance(config, before, state, now)
    effects = [*effects, *expired, *turned, *moved]
    state, judged = quarantine.advance(config, state, effects)
    state, keeps = cycles.advance(config, before, state)
    state, watches = cycles.watch(config, before, state)
    state, told = alerts.of_absences(config, state, now)
    effects += [*judged, *keeps, *watches, *told]
    return state, effects


def next_deadline(state: State, now: float) -> float | None:
    """Return the next time at which time alone may change something: an expiry, the end
    of a grace window or of a flush, an absence to tell of. `now` is the time of the
    last step, which handled everything due until then."""
    soonest = alerts.next_of_absences(state, now)
    expiry = state.islands.expiry
    if now < expiry < soonest:
        soonest = expiry
    for index in state.fragments.open_ones:
        at = state.fragments[index].closes_at
        if at is not None and now < at < soonest:
            soonest = at
    soonest = min(soonest, ending.soonest(state, now))
    return None if soonest == math.inf else soonest


def _report(
    config: PolicyConfig, state: State, event: Said, report: Report, now: float
) -> Step:
    island = state.islands.get(event.island)
    if state.phase == "done":
        return state, [ignored("run", state.phase, "report")]
    if island is None or island.session != event.session or island.status == "gone":
        fenced = Refused(
            code="fenced",
            message=f"island {event.island!r} is served by another session now; "
            f"stop this process",
        )
        return state, members.turned_away(event.island, event.session, fenced)
    if report.phase == "training" and island.phase in BEGINNING:
        # The island joins the pacing with the steps in this report. An island that had
        # stopped by its own count and goes on after losses is in the pacing already.
        island = schedule.restart(island)
    heard, too_fast = claims.heard(config, island, report, now)
    if wrong := claims.wrong_report(island, report) or too_fast:
        return members.put_out(state, island, wrong)
    island = heard
    through, new = island.records_through, []
    for record in report.records:
        if record.seq > through:
            through = record.seq
            new.append(record)
    island = replace(
        island,
        phase=report.phase,
        records_through=through,
        watches=report.watches,
    )
    state = members.alive(config, state, island, now)
    effects: list[Effect] = []
    for record in new:
        state, found = _record(config, state, island, record, now)
        effects += found
    if state.phase == "running":
        state, grants = leases.top_up(config, state, event.island, now)
        effects += grants
    tokens = max(state.progress_tokens, ledger.progress_tokens(config, state))
    state = replace(state, progress_tokens=tokens)
    island = state.islands[event.island]
    state, asks = ending.island_stopped(config, state, event.island)
    effects += asks
    progress = Progress(
        tokens=tokens,
        own_tokens=island.steps * island.tokens_per_step,
        records_through=island.records_through,
        next_position=state.next_position,
    )
    effects.append(Tell(session=event.session, message=progress))
    return state, effects


def _record(
    config: PolicyConfig, state: State, island: Island, record: Record, now: float
) -> Step:
    name = island.name
    fact = records.Fact(island=name, incarnation=island.incarnation, record=record)
    effects: list[Effect] = [Note(record=fact)]
    if record.kind == "adopted":
        fragment = state.fragments[record.fragment]
        fragment = takes.adopted(fragment, name, record.version)
        return with_fragment(state, fragment), effects
    if record.kind not in ("took", "reopened", "dropped", "reset", "carried"):
        return state, effects
    fragment = state.fragments[record.fragment]
    carrying = fragment.accounts[name].carrying
    if carrying != (record.kind == "carried"):
        effects.append(ignored("take", "carried", "record"))
        return state, effects
    if carrying:
        fragment = ledger.carry(fragment, name, record.start)
        carried = records.Carried(
            island=name,
            incarnation=island.incarnation,
            fragment=fragment.index,
            steps=record.start,
        )
        effects.append(Persist(record=carried))
    elif record.kind == "took":
        fragment, found = takes.took(config, fragment, name, record, now)
        effects += found
    else:
        kept = record.kind == "reopened"
        fragment, found = takes.gave_up(fragment, name, record.tick, kept=kept)
        effects += found
    return with_fragment(state, fragment), effects


def _arrived(
    config: PolicyConfig, state: State, event: DeltaArrived, now: float
) -> Step:
    island = state.islands.get(event.island)
    if (
        island is None
        or island.incarnation != event.incarnation
        or island.status == "gone"
    ):
        drops = takes.drop_unknown(
            state.fragments[event.fragment],
            event.island,
            event.incarnation,
            event.tick,
        )
        return state, [*drops, ignored("island", "gone", "bytes")]
    before = state.fragments[event.fragment]
    fragment, effects = takes.arrived(before, event, now)
    state = with_fragment(state, fragment)
    if fragment is not before:
        # Every delta that arrives renews the wait for the next one.
        state = _waits_longer(config, state, now)
    state, asks = ending.island_stopped(config, state, event.island)
    return state, effects + asks


def _waits_longer(config: PolicyConfig, state: State, now: float) -> State:
    """Count the wait of a flush that is under way from now."""
    if state.phase != "flushing":
        return state
    return ending.wait(config, state, now)


def _advance(config: PolicyConfig, before: State, state: State, now: float) -> Step:
    """Make the moves that follow from the state: ticks, closings, the end.

    before: the state before this event. Islands that the event did not touch make no
    tick due. Fragments that it did not touch are left alone, unless time alone moves
    them or the set of live islands changed.
    """
    a, b = before.islands.standing, state.islands.standing
    same_live = a is b or (a.counted, a.answering) == (b.counted, b.answering)
    effects: list[Effect] = []
    state = leases.free_departed(state)
    if state.phase == "running" and state.progress_tokens >= config.total_tokens:
        state, effects = ending.stop(config, state, now)
    if state.islands is not before.islands:
        state, found = _due_ticks(config, state, now)
        effects += found
    if not same_live or state.tick != before.tick:
        state, found = _hasten(config, state)
        effects += found
    late = now >= state.deadline
    if state.phase == "stopping" and (late or not ending.awaited(state)):
        state = replace(state, phase=RUN.move(state.phase, "flush"))
        state = ending.wait(config, state, now)
    moving = list(state.fragments)
    if same_live and state.phase == "running":
        moving = [
            fragment
            for fragment in map(moving.__getitem__, state.fragments.open_ones)
            if fragment is not before.fragments[fragment.index]
            or _closes(fragment, now)
        ]
    if moving:
        state, found = _settle(config, state, moving, now)
        effects += found
    if state.phase == "flushing" and all(f.phase == "done" for f in state.fragments):
        state, found = ending.finish(config, state)
        effects += found
    return state, effects


def _due_ticks(config: PolicyConfig, state: State, now: float) -> Step:
    """Open the fragments whose ticks are due."""
    effects: list[Effect] = []
    while state.phase == "running" and schedule.tick_is_due(config, state, now):
        state, reserved = schedule.advance(config, state)
        effects += reserved
        fragment = state.fragments[schedule.fragment_of(config, state.tick)]
        tick, fleet = state.tick, Fleet(config, state)
        counted = state.islands.standing.counted
        found: list[Effect]
        if fragment.phase == "idle":
            fragment, found = fragments.open_tick(
                config, fragment, fleet, tick, counted, now
            )
        else:
            fragment, found = fragments.busy_tick(fragment, fleet, tick, counted)
        state = with_fragment(state, fragment)
        effects += found
    return state, effects


def _hasten(config: PolicyConfig, state: State) -> Step:
    """Ask again for takes that need not be put off any more."""
    effects: list[Effect] = []
    waiting = [fragment for fragment in state.fragments if fragment.put_off]
    fleet = Fleet(config, state)
    for fragment in waiting:
        fragment, found = fragments.hasten(fragment, fleet)
        state = with_fragment(state, fragment)
        effects += found
    return state, effects


def _settle(
    config: PolicyConfig, state: State, moving: list[Fragment], now: float
) -> Step:
    """Settle fragments that time or an event may have moved: order merges, and during
    the flush the last takes."""
    effects: list[Effect] = []
    fleet = Fleet(config, state)
    live = () if state.phase == "running" else state.islands.standing.answering
    hurry = state.phase == "flushing" and now >= state.deadline
    for fragment in moving:
        was_open = fragment.phase == "open"
        if state.phase == "flushing":
            state, found = ending.flush(config, state, fragment, live, now, hurry=hurry)
            effects += found
            fragment = state.fragments[fragment.index]
        over = fragment.phase == "open" and ending.is_over(state, fragment, now)
        fragment, found = fragments.settle(config, fragment, fleet, now, hurry=over)
        if fragment is not state.fragments[fragment.index]:
            state = with_fragment(state, fragment)
        effects += found
        if was_open and state.phase == "flushing" and fragment.phase == "idle":
            moving.append(fragment)  # Given up: its next tick need not wait.
    return state, effects


def _is_welcome(effects: list[Effect]) -> bool:
    return any(isinstance(e, Tell) and isinstance(e.message, Welcome) for e in effects)


def _closes(fragment: Fragment, now: float) -> bool:
    at = fragment.closes_at
    return at is not None and now >= at
