"""The coordinator's half: its decisions, as one pure function of events and time.

`step(config, state, event, now) -> (state, effects)`; the service and the virtual-time
simulator both drive it. `next_deadline` says when a `Timer` is due; `recovery.recover`
rebuilds the state from durable records.

Phases of a run: running -> stopping (islands end their steps) -> flushing (open steps
are merged without a quorum, until a deadline) -> done, and running again if the run is
extended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec.structs import replace

from diloco_jax.protocol import messages, records
from diloco_jax.protocol.coordinator import (
    claims,
    ending,
    fragments,
    leases,
    ledger,
    members,
    schedule,
    steering,
    takes,
)
from diloco_jax.protocol.coordinator.islands import NOBODY, Absences, Island
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import (
    RUN,
    Disconnected,
    Effect,
    Event,
    Fragment,
    KeepAsked,
    MachineSlept,
    PolicyConfig,
    RunExtended,
    RunResumed,
    Said,
    SaidAhead,
    State,
    Timer,
    Turn,
)
from diloco_jax.protocol.holding import CycleKept, DeltaArrived, MergePrepared
from diloco_jax.protocol.messages import BEGINNING, Record

NAMED = 8
"""Islands that one alert names; it counts those beyond."""


def step(
    config: PolicyConfig, state: State, event: Event, now: float
) -> tuple[State, list[Effect]]:
    """Apply one event at time `now` (monotonic seconds)."""
    turn = Turn(config, state, now)
    ending.awake(turn)
    before = turn.state
    _handle(turn, event)
    members.expire(turn, ending.late_s(config, turn.state))
    takes.refuse_quarantined(turn)
    _advance(turn, before)
    takes.advance_quarantine(turn)
    schedule.keep_cycles(turn, before)
    schedule.watch_cycles(turn, before)
    _tell_absences(turn)
    return turn.state, turn.effects


def _handle(turn: Turn, event: Event) -> None:
    match event:  # Most events are reports.
        case Said(message=messages.Report() as report):
            _report(turn, event, report)
        case SaidAhead():
            members.ahead(turn, event)
        case messages.Hello():
            members.hello(turn, event)
        case Said(message=messages.Goodbye() as goodbye):
            members.goodbye(turn, event, goodbye)
        case Said(message=messages.DonorFailed(island=donor)):
            members.donor_failed(turn, event, donor)
        case Disconnected():
            members.disconnected(turn, event)
        case RunResumed():
            members.resumed(turn, event)
        case RunExtended():
            ending.extend(turn)
        case messages.Steer():
            steering.steer(turn, event)
        case KeepAsked():
            schedule.ask_for_cycle(turn)
        case CycleKept():
            schedule.cycle_kept(turn, event)
        case DeltaArrived():
            _arrived(turn, event)
        case MergePrepared():
            fragments.prepared(turn, event)
            if turn.state.phase == "flushing" and turn.now < turn.state.deadline:
                ending.wait(turn)  # Later steps of who is in it are yet to come.
        case MachineSlept(seconds=seconds):
            turn.state = claims.slept(turn.state, seconds)
        case Timer():
            pass


def next_deadline(state: State, now: float) -> float | None:
    """Return the next time at which time alone may change something: an expiry, the end
    of a grace window or of a flush, an absence to tell of. `now` is the time of the
    last step, which handled everything due until then."""
    soonest = _next_of_absences(state, now)
    expiry = state.islands.expiry
    if now < expiry < soonest:
        soonest = expiry
    for fragment in state.fragments:
        at = fragment.closes_at if fragment.phase == "open" else None
        if at is not None and now < at < soonest:
            soonest = at
    soonest = min(soonest, ending.soonest(state, now))
    return None if soonest == math.inf else soonest


def _report(turn: Turn, event: Said, report: messages.Report) -> None:
    name, config = event.island, turn.config
    island = turn.state.islands.get(name)
    if turn.state.phase == "done":
        turn.ignore("run", turn.state.phase, "report")
        return
    if island is None or island.session != event.session or island.status == "gone":
        fenced = messages.Refused(
            code="fenced",
            message=f"island {name!r} is served by another session now; stop this "
            f"process",
        )
        members.turn_away(turn, name, event.session, fenced)
        return
    if report.phase == "training" and island.phase in BEGINNING:
        # The island joins the pacing with the steps in this report. An island that had
        # stopped by its own count and goes on after losses is in the pacing already.
        island = schedule.restart(island)
    heard, too_fast = claims.heard(config, island, report, turn.now)
    if wrong := claims.wrong(island, report) or too_fast:
        members.put_out(turn, island, wrong)
        return
    through, new = island.records_through, []
    for record in report.records:
        if record.seq > through:
            through = record.seq
            new.append(record)
    island = replace(
        heard, phase=report.phase, records_through=through, watches=report.watches
    )
    members.alive(turn, island)
    for record in new:
        _record(turn, island, record)
    if turn.state.phase == "running":
        leases.top_up(turn, name)
    tokens = ledger.progress_tokens(config, turn.state)
    turn.set(progress_tokens=max(turn.state.progress_tokens, tokens))
    ending.island_stopped(turn, name)
    progress = messages.Progress(
        tokens=turn.state.progress_tokens,
        own_tokens=island.steps * island.tokens_per_step,
        records_through=through,
        next_position=turn.state.next_position,
    )
    turn.tell(event.session, progress)


def _record(turn: Turn, island: Island, record: Record) -> None:
    name = island.name
    turn.note(records.Fact(**island.who, record=record))
    if record.kind in ("granted", "progress", "restored", "adopted"):
        return
    fragment = turn.state.fragments[record.fragment]
    carrying = fragment.accounts[name].carrying
    if carrying != (record.kind == "carried"):
        turn.ignore("take", "carried", "record")
    elif carrying:
        turn.put(ledger.carry(fragment, name, record.start))
        index, steps = fragment.index, record.start
        turn.persist(records.Carried(**island.who, fragment=index, steps=steps))
    elif record.kind == "took":
        turn.put(takes.took(turn, fragment, name, record))
    else:
        kept = record.kind == "reopened"
        turn.put(takes.gave_up(turn, fragment, name, record.tick, kept=kept))


def _arrived(turn: Turn, event: DeltaArrived) -> None:
    name, before = event.island, turn.state.fragments[event.fragment]
    island = turn.state.islands.get(name)
    if (
        island is None
        or island.incarnation != event.incarnation
        or island.status == "gone"
    ):
        takes.drop_unknown(turn, before, event)
        turn.ignore("island", "gone", "bytes")
        return
    fragment = takes.arrived(turn, before, event)
    if fragment is not before:
        turn.put(fragment)
        if turn.state.phase == "flushing":
            ending.wait(turn)  # Every delta renews the wait for the next one.
    ending.island_stopped(turn, name)


def _advance(turn: Turn, before: State) -> None:
    """Make the moves that follow from the state: ticks, closings, the end.

    before: the state before this event. Islands that the event did not touch make no
    tick due. Fragments that it did not touch are left alone, unless time alone moves
    them or the set of live islands changed.
    """
    a, b = before.islands.standing, turn.state.islands.standing
    same_live = a is b or (a.counted, a.answering) == (b.counted, b.answering)
    turn.state = leases.free_departed(turn.state)
    enough = turn.state.progress_tokens >= turn.config.total_tokens
    if turn.state.phase == "running" and enough:
        ending.stop(turn)
    if turn.state.islands is not before.islands:
        _due_ticks(turn)
    if not same_live or turn.state.tick != before.tick:
        _hasten(turn)
    late = turn.now >= turn.state.deadline
    if turn.state.phase == "stopping" and (late or not ending.awaited(turn.state)):
        turn.set(phase=RUN.move(turn.state.phase, "flush"))
        ending.wait(turn)
    moving = list(turn.state.fragments)
    if same_live and turn.state.phase == "running":
        moving = [
            fragment
            for fragment in moving
            if fragment.phase == "open"
            and (
                fragment is not before.fragments[fragment.index]
                or (fragment.closes_at is not None and turn.now >= fragment.closes_at)
            )
        ]
    if moving:
        _move_fragments(turn, moving)
    done = all(fragment.phase == "done" for fragment in turn.state.fragments)
    if turn.state.phase == "flushing" and done:
        ending.finish(turn)


def _due_ticks(turn: Turn) -> None:
    """Open the fragments whose ticks are due."""
    config = turn.config
    while turn.state.phase == "running" and schedule.tick_is_due(
        config, turn.state, turn.now
    ):
        schedule.advance(turn)
        tick, live = turn.state.tick, turn.state.islands.standing.counted
        fragment = turn.state.fragments[schedule.fragment_of(config, tick)]
        is_idle = fragment.phase == "idle"
        handle = fragments.open_tick if is_idle else fragments.busy_tick
        turn.put(handle(turn, fragment, Fleet(config, turn.state), tick, live))


def _hasten(turn: Turn) -> None:
    """Ask again for takes that need not be put off any more."""
    fleet = Fleet(turn.config, turn.state)
    for fragment in turn.state.fragments:
        if fragment.put_off:
            turn.put(fragments.hasten(turn, fragment, fleet))


def _move_fragments(turn: Turn, moving: list[Fragment]) -> None:
    """Close fragments that time or an event may have moved, and during the flush open
    them for the last takes."""
    fleet, flushing = Fleet(turn.config, turn.state), turn.state.phase == "flushing"
    live = turn.state.islands.standing.answering
    hurry = flushing and turn.now >= turn.state.deadline
    for fragment in moving:
        was_open = fragment.phase == "open"
        if flushing:
            ending.flush(turn, fragment, live, hurry=hurry)
            fragment = turn.state.fragments[fragment.index]
        over = (
            flushing
            and fragment.phase == "open"
            and ending.is_over(turn.state, fragment, turn.now)
        )
        after = fragments.close_if_due(turn, fragment, fleet, hurry=over)
        if after is not fragment:
            turn.put(after)
        if was_open and flushing and after.phase == "idle":
            moving.append(after)  # Given up: its next tick need not wait.


def _next_of_absences(state: State, now: float) -> float:
    """Return the next time at which there is an absence to tell of, or infinity."""
    known = state.absences
    if known is NOBODY:
        return math.inf
    times = [at for name, at in known.due.items() if name not in known.told]
    times += [at for at in (known.back_due, known.none_due) if at is not None]
    return min((at for at in times if at > now), default=math.inf)


def _tell_absences(turn: Turn) -> None:
    """Tell people of absences that have lasted, and of islands that are back."""
    known, islands, now = turn.state.absences, turn.state.islands, turn.now
    live, absent = islands.standing.live, islands.standing.absent
    if turn.state.phase != "running":
        if known is not NOBODY:
            turn.set(absences=NOBODY)
        return
    if known is NOBODY and len(live) == len(islands):
        return
    lasts_s, reunion_s = turn.config.lease_s, turn.config.reunion_s
    due = {name: known.due.get(name, now + lasts_s) for name in absent}
    left = f"{len(live)} of {len(islands)} islands are left"
    if live and known.none_told:
        assert known.none_due is not None
        away_s = now - known.none_due + lasts_s
        turn.alert(
            f"{_who_are(live)} back: for {away_s:.0f} s no island was left; {left}"
        )
        # Those that are still absent are told of, if they stay so.
        turn.set(absences=Absences(due=dict.fromkeys(absent, now + lasts_s)))
        return
    told, none_told = {*known.told}, known.none_told
    none_due = None if live else (known.none_due or now + lasts_s)
    if none_due is not None and now >= none_due and not none_told:
        none_told, told = True, told | {*due}
        turn.alert(
            f"no island is left: {_who_are(islands)} absent or gone, each for "
            f"{lasts_s:g} s or more, and nothing is computed; look at their machines "
            f"and at the network between them and the coordinator"
        )
    untold = {name: at for name, at in due.items() if name not in told}
    if min(untold.values(), default=math.inf) <= now:
        found = [name for name, at in untold.items() if at <= now + reunion_s]
        told |= {*found}
        turn.alert(
            f"{_who_are(found)} absent: no sign of life for {lasts_s:g} s "
            f"or more; {left}; look at the machines, and at the network between them "
            f"and the coordinator; an island that is back goes on where it was",
            found[0],
        )
    back = sorted(told & {*live})
    back_due = (known.back_due or now + reunion_s) if back else None
    if back_due is not None and (now >= back_due or len(back) == len(told)):
        told, back_due = told - {*back}, None
        turn.alert(f"{_who_are(back)} back; {left}", back[0])
    known = Absences(
        due=due,
        told=tuple(sorted(told)),
        back_due=back_due,
        none_due=none_due,
        none_told=none_told,
    )
    turn.set(absences=NOBODY if known == NOBODY else known)


def _who_are(islands: Iterable[str]) -> str:
    names = sorted(islands)
    beyond = len(names) - NAMED
    shown = ", ".join(map(repr, names[:NAMED]))
    more = f" and {beyond} more" if beyond > 0 else ""
    if len(names) == 1:
        return f"island {shown} is"
    return f"islands {shown}{more} are"
