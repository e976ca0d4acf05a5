"""Membership: who is let in, hellos, leases, incarnations, fencing.

An island enters as a new incarnation, as a known one that returns, or as one that
joined before the coordinator lost its state. Its name is in the config, or an operator
let it in (`steering.py`). At its hello, what it and the coordinator know of its takes
is reconciled: verdicts, requests and bytes may be lost with a connection, and a
coordinator that was started again knows no take at all.

An island is live while its reports come, absent while they do not, and gone after its
incarnation ended: by goodbye, or because a higher incarnation said hello. Only the end
of an incarnation loses steps; an absent island that returns has lost nothing. An island
that joined before the coordinator lost its state is new to it, but keeps its steps.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from msgspec.structs import asdict, replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import (
    claims,
    fragments,
    leases,
    ledger,
    schedule,
    takes,
)
from diloco_jax.protocol.coordinator.islands import Island, Islands
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import (
    ISLAND,
    Disconnected,
    Fragment,
    Outdated,
    PolicyConfig,
    RunResumed,
    Said,
    SaidAhead,
    State,
    Turn,
    is_let_in,
    with_fragment,
    with_island,
)
from diloco_jax.protocol.holding import Forget
from diloco_jax.protocol.messages import (
    BEGINNING,
    DONOR_RESTS,
    FAILURES,
    LOOKAHEAD,
    EndReason,
    Goodbye,
    Hello,
    Outstanding,
    Refused,
    Span,
    Stop,
    Welcome,
    lookahead_of,
)


def entry_refusal(config: PolicyConfig, state: State, event: Hello) -> Refused | None:
    """Return the reason to refuse an island; None if it may join."""
    refused = _refusal(config, state, event)
    return refused and Refused(code=refused[0], message=refused[1])


def _refusal(
    config: PolicyConfig, state: State, event: Hello
) -> tuple[str, str] | None:
    name, term, next_one = event.island, state.term, event.incarnation + 1
    known = state.islands.get(name)
    resumes = known is not None and known.incarnation == event.incarnation
    if event.run_id not in ("", config.run_id):
        return "run_id", (
            f"this coordinator serves run {config.run_id}, the island belongs to run "
            f"{event.run_id}; check the coordinator's address, or start the island "
            f"again"
        )
    if event.term == term and event.term_name != state.term_name:
        return "other_term", (
            f"island {name!r} is in term {event.term} {event.term_name!r}, which "
            f"another coordinator of this run has opened, and this one is in term "
            f"{term} {state.term_name!r}: their values differ; start it again with "
            f"incarnation {next_one}"
        )
    if event.fingerprint != config.fingerprint:
        return "config", (
            f"the run's config has fingerprint {config.fingerprint}, the island's "
            f"{event.fingerprint}; start it with the run's config.json"
        )
    if message := unknown(config, name, state.admitted):
        return "unknown_island", message
    if message := _other_batch(config, event) or _other_lookahead(config, event):
        return "config", message
    if known is not None and event.incarnation < known.incarnation:
        return "fenced", (
            f"island {name!r} is incarnation {known.incarnation} now, this is "
            f"{event.incarnation}; stop this process. If none of yours is "
            f"{known.incarnation}, its key is stolen: revoke that, and start this one "
            f"with a new key and --incarnation {known.incarnation + 1}"
        )
    goes_on = resumes or is_carrying(state, event)
    if state.phase == "done" or (state.phase != "running" and not goes_on):
        return "finished", (
            f"the run is {state.phase}: it has its {config.total_tokens} tokens; for "
            f"more, start its coordinator with --resume and a higher total_tokens"
        )
    if known is not None and resumes:
        if known.status == "gone":
            return "fenced", (
                f"incarnation {event.incarnation} of island {name!r} has ended; start "
                f"it again with incarnation {next_one}"
            )
        if known.session != event.session:
            return "name_in_use", (
                f"the name {name!r} is in use by another process with the same "
                f"incarnation {event.incarnation}; choose another name, or replace "
                f"that process by starting incarnation {next_one}"
            )
        return None
    if known is not None and (message := _fruitless(config, known)):
        return "no_progress", message
    if event.term >= state.books:
        return "other_term", (
            f"incarnation {event.incarnation} of island {name!r} was let in by another "
            f"coordinator of this run, in its term {event.term}, whose state is lost; "
            f"this one, in term {term}, does not know it; start it again with "
            f"incarnation {next_one}"
        )
    if is_carrying(state, event) and (wrong := claims.wrong_carried(state, event)):
        return "claims", wrong_claim(name, event.incarnation, wrong)
    return None


def unknown(config: PolicyConfig, name: str, also: tuple[str, ...] = ()) -> str:
    """Explain why an island of that name is not let in; empty if it may be. also:
    those that an operator let in."""
    if config.admitted is None or is_let_in(config, name, also):
        return ""
    return (
        f"the coordinator's config has no island {name!r}, only "
        f"{', '.join(map(repr, (*config.admitted, *also)))}; let it in with `diloco "
        f"admit {name} --coordinator HOST:PORT`, or add it there to islands, or its "
        f"name to placement.admit, and start the coordinator again: the run goes on"
    )


def with_admitted(state: State, name: str, *, admitted: bool) -> State:
    """Return the state with an island let in by an operator, or no longer; recovery
    applies this too."""
    others = tuple(other for other in state.admitted if other != name)
    return replace(state, admitted=(*others, name) if admitted else others)


def wrong_claim(name: str, incarnation: int, wrong: str) -> str:
    """Return the message to an island whose claim cannot be true."""
    return (
        f"incarnation {incarnation} of island {name!r} claims the impossible: {wrong}; "
        f"its unmerged steps are lost, start it again with incarnation "
        f"{incarnation + 1}"
    )


def _fruitless(config: PolicyConfig, known: Island) -> str:
    """Explain why no further incarnation of the island is let in; empty if it may be.
    The last one counts if it was not heard to end."""
    unheard = known.status != "gone" and not known.steps
    failures = known.fruitless + unheard
    if not config.fruitless_starts or failures < config.fruitless_starts:
        return ""
    return (
        f"island {known.name!r} failed {failures} times in a row before its first step "
        f"(placement.fruitless_starts = {config.fruitless_starts}); its logs say why. "
        f"Put that right, and start the coordinator again with a higher number: the "
        f"run goes on"
    )


def _other_batch(config: PolicyConfig, event: Hello) -> str:
    if config.admitted is None:
        return ""
    sequences = config.admitted.get(event.island) or event.sequences_per_step
    tokens = sequences * config.sequence_length
    if (event.sequences_per_step, event.tokens_per_step) == (sequences, tokens):
        return ""
    return (
        f"island {event.island!r} says that its steps have {event.sequences_per_step} "
        f"sequences and {event.tokens_per_step} tokens, but the coordinator's config "
        f"(islands.{event.island}.batch_size, sequence_length) says {sequences} "
        f"and {tokens}; start both with one config"
    )


def _other_lookahead(config: PolicyConfig, event: Hello) -> str:
    hosts = config.hosts.get(event.island)
    if hosts is None and event.lookahead in (0, LOOKAHEAD):
        return ""  # The config does not say how many hosts it has.
    lookahead = lookahead_of(hosts or 1)
    if event.lookahead == lookahead:
        return ""
    return (
        f"island {event.island!r} says that its takes come {event.lookahead} "
        f"boundaries late, but it has {hosts or 1} hosts in the coordinator's config "
        f"(islands.{event.island}.hosts), with which that is {lookahead}; start both "
        f"with one config"
    )


def how_ahead(config: PolicyConfig, state: State, event: Hello) -> str:
    """Explain in which way the island knows of a later state of this run; empty if it
    does not. Versions are durable before any island has them."""
    if event.run_id != config.run_id or unknown(config, event.island, state.admitted):
        return ""  # It is refused.
    if event.term > state.term:
        return f"in term {event.term}, and this coordinator in term {state.term}"
    for fragment, version in zip(state.fragments, event.versions, strict=False):
        if version > fragment.version:
            return (
                f"at version {tuple(version)} of fragment {fragment.index}, and this "
                f"coordinator at {tuple(fragment.version)}"
            )
    return ""


def is_carrying(state: State, event: Hello) -> bool:
    """Tell whether the island joined before the coordinator lost its log."""
    return 0 < event.term < state.books


def without_take(turn: Turn, fragment: Fragment, fleet: Fleet, name: str) -> Fragment:
    """Repeat the request to an island that holds no take of the fragment: the first
    may be lost."""
    take = fragment.accounts[name].take
    # With an end it is ready, or the island gave the refused take up, and the record
    # of that is on its way.
    if take is None or take.end is not None:
        return fragment
    return fragments.request(turn, fragment, fleet, name)


def with_take(
    turn: Turn,
    fragment: Fragment,
    fleet: Fleet,
    name: str,
    held: Outstanding,
    *,
    recorded: bool,
) -> Fragment:
    """Reconcile the account with a take whose verdict the island does not know.
    recorded: the take's record is on the tape; otherwise it comes with the next report,
    and the take is not merged before it."""
    account = fragment.accounts[name]
    told = account.told
    if told is not None and told.tick == held.tick:
        verdict = takes.verdict_at(fragment, told.tick, told.verdict, told.reason)
        turn.tell(account.session, verdict)
        # The next request may be lost together with the verdict.
        return without_take(turn, fragment, fleet, name)
    before = len(turn.effects)
    if recorded:
        fragment = takes.known(turn, fragment, name, held)
    take = fragment.accounts[name].take
    if take is None or take.tick != held.tick:
        return fragment
    if take.refused:
        if len(turn.effects) == before:
            verdict = takes.verdict_at(fragment, take.tick, "refused", take.refused)
            turn.tell(account.session, verdict)
        return fragment
    takes.pending(turn, fragment, name)
    if not take.arrived:
        fragment = takes.ask_to_resend(turn, fragment, name)
    return fragment


def hello(turn: Turn, event: Hello) -> None:
    """Let an island join or resume, or turn it away."""
    if event.island in turn.state.ahead:
        others = tuple(name for name in turn.state.ahead if name != event.island)
        turn.set(ahead=others)
    refusal = entry_refusal(turn.config, turn.state, event)
    if refusal is not None:
        turn_away(turn, event.island, event.session, refusal)
        return
    known = turn.state.islands.get(event.island)
    if known is not None and known.incarnation == event.incarnation:
        heard, too_fast = claims.heard(turn.config, known, event, turn.now)
        if wrong := claims.wrong(known, event) or too_fast:
            put_out(turn, known, wrong)
            return
        _resume(turn, heard, event)
    elif known is not None and known.status != "gone":
        leave(turn, known.name, "died")
        _join(turn, event, known)
    else:
        _join(turn, event, None)
    if turn.state.phase != "running":
        turn.tell(event.session, Stop())


def ahead(turn: Turn, event: SaidAhead) -> None:
    """Note that an island knows of a later state than this one. Once most islands of
    the config do, this coordinator ends: it would make other merges of versions that
    are made already."""
    if event.island in turn.state.ahead:
        return
    turn.set(ahead=(*turn.state.ahead, event.island))
    turn.alert(
        f"island {event.island!r} is {event.how}: either this coordinator's state is "
        f"an old one, or that island lies; it is told to come again. If other islands "
        f"say so too, start the coordinator that has the newest state; if none does, "
        f"revoke its key",
        event.island,
    )
    known = turn.config.admitted or turn.state.islands
    names = [name for name in turn.state.ahead if name in known]
    if 2 * len(names) > len(known):
        text = (
            f"{len(names)} of {len(known)} islands ({', '.join(names)}) have versions "
            f"that this coordinator has not: its state is an old one. Start the "
            f"coordinator that has the newest snapshots and log, or start this one on "
            f"an empty workdir, with islands running: it gathers their state"
        )
        turn.effects.append(Outdated(text=text))


def turn_away(turn: Turn, island: str, session: str, refused: Refused) -> None:
    """End a session with this reason."""
    turn.note(
        records.TurnedAway(island=island, code=refused.code, message=refused.message)
    )
    turn.tell(session, refused)


def alive(turn: Turn, island: Island) -> None:
    """Note a sign of life of an island, which is as given."""
    if island.status == "absent":
        schedule.reunite(turn)
        status = ISLAND.move(island.status, "be heard")
        island = replace(schedule.restart(island), status=status)
    lease_s = turn.config.lease_s
    if island.phase in BEGINNING:  # It may be silent for longer.
        lease_s = max(turn.config.compile_budget_s, lease_s)
    turn.put(replace(island, lease_until=turn.now + lease_s))


def disconnected(turn: Turn, event: Disconnected) -> None:
    """Mark an island absent because its connection broke."""
    island = turn.state.islands.get(event.island)
    if island is None or island.session != event.session:
        turn.ignore("island", "replaced", "disconnect")
    elif island.status != "live":
        turn.ignore("island", island.status, "disconnect")
    else:
        _absent(turn, island, "disconnected")


def goodbye(turn: Turn, event: Said, said: Goodbye) -> None:
    """End an incarnation at its goodbye; its deltas that have arrived stay."""
    island = turn.state.islands.get(event.island)
    if island is None or island.session != event.session or island.status == "gone":
        turn.ignore("island", "replaced", "goodbye")
        return
    leave(turn, event.island, said.reason, said.text)
    if said.reason == "failed":
        turn.alert(
            f"island {event.island!r} failed, and says: {said.text or 'nothing'}; look "
            f"at its log and at its devices (diloco doctor); its supervisor starts it "
            f"again",
            event.island,
        )


def donor_failed(turn: Turn, event: Said, donor: str) -> None:
    """Note that an island failed another one of its region; see `islands.donors`."""
    islands, regions = turn.state.islands, turn.config.regions
    sayer, accused = islands.get(event.island), islands.get(donor)
    region = regions.get(event.island)
    if sayer is None or sayer.session != event.session or sayer.status == "gone":
        turn.ignore("island", "replaced", "failed donor")
    elif accused is not None and region and regions.get(donor) == region:
        until = turn.now + DONOR_RESTS * turn.config.lease_s
        complaints = accused.complaints | {event.island: until}
        turn.put(replace(accused, complaints=complaints))


def expire(turn: Turn, late_s: float) -> None:
    """Mark the islands absent whose leases ran out. late_s: time for which
    they count as silent within their leases all the same (`ending.late_s`)."""
    if turn.now < turn.state.islands.expiry:
        return
    for island in turn.state.islands.values():
        if island.status == "live" and turn.now >= island.lease_until:
            until = island.lease_until + late_s
            _absent(turn, replace(island, lease_until=until), "silent")
    turn.set(islands=Islands(turn.state.islands.values()))


def resumed(turn: Turn, event: RunResumed) -> None:
    """End every incarnation from before the run was stopped; islands that return have
    higher ones."""
    for name, island in turn.state.islands.items():
        if island.status != "gone":
            reported = event.steps.get((name, island.incarnation), 0)
            # A figure that nothing has checked: no more than it had data for.
            most = island.sequences_granted // island.sequences_per_step
            steps = max(island.steps, min(reported, most))
            turn.put(replace(island, steps=steps))
            end(turn, name, "stopped")


def fences(state: State) -> tuple[Forget, ...]:
    """Return which incarnations of each island have ended, for a worker that begins."""
    return tuple(
        Forget(
            island=name,
            before=island.incarnation + (island.status == "gone"),
            kept=(),
        )
        for name, island in sorted(state.islands.items())
    )


def put_out(turn: Turn, island: Island, wrong: str) -> None:
    """End an incarnation whose claim cannot be true. The claim is not booked; earlier
    claims stay booked."""
    message = wrong_claim(island.name, island.incarnation, wrong)
    end(turn, island.name, "refused", message)
    refused = Refused(code="claims", message=message)
    turn_away(turn, island.name, island.session, refused)


def leave(turn: Turn, name: str, reason: EndReason, said: str = "") -> None:
    """End an incarnation, as `end` does; its deltas that have arrived stay for the next
    merges."""
    for fragment in turn.state.fragments:
        turn.put(takes.leave_behind(fragment, name))
    end(turn, name, reason, said)


def end(turn: Turn, name: str, reason: EndReason, said: str = "") -> None:
    """End an incarnation: its open steps are lost, and their data is free again.
    said: text of its goodbye; empty if there was none."""
    state = turn.state
    island = state.islands[name]
    settled = tuple(ledger.settled_steps(f, island) for f in state.fragments)
    kept = leases.perhaps_merged(state, island)
    turn.state = ended(state, name, reason, settled, kept)
    before = _lost_by_fragment(state, name, reason)
    lost = _lost_by_fragment(turn.state, name, reason)
    turn.persist(
        records.Left(
            **island.who,
            steps=island.steps,
            reason=reason,
            said=said,
            settled_steps_by_fragment=settled,
            in_merges=kept,
            lost_tokens_by_fragment=tuple(map(operator.sub, lost, before)),
            left_behind=tuple(
                records.LeftBehind(fragment=fragment.index, **asdict(delta))
                for fragment in state.fragments
                for delta in fragment.left_behind
                if (delta.island, delta.incarnation) == (name, island.incarnation)
            ),
        )
    )
    for fragment in state.fragments:
        if fragment.accounts[name].take is not None:
            takes.drop(turn, fragment, name)


def _lost_by_fragment(state: State, name: str, reason: EndReason) -> list[int]:
    """Return the tokens that all incarnations of an island have lost for a reason."""
    return [f.accounts[name].lost_tokens.get(reason, 0) for f in state.fragments]


def ended(
    state: State,
    name: str,
    reason: EndReason,
    settled_steps: Sequence[int],
    in_merges: Sequence[Span],
) -> State:
    """Return the state after an incarnation's end; recovery applies it too. Both
    `settled_steps`, by fragment, and the steps `in_merges` of some fragment include
    merges under way and deltas left behind."""
    state = leases.release(state, name, in_merges)
    island = state.islands[name]
    for fragment, settled in zip(state.fragments, settled_steps, strict=True):
        fragment = ledger.close_account(fragment, island, reason, settled)
        state = with_fragment(state, fragment)
    fruitless = island.fruitless
    if island.steps:
        fruitless = 0
    elif reason in FAILURES:
        fruitless += 1
    status = ISLAND.move(island.status, "end")
    return with_island(state, replace(island, status=status, fruitless=fruitless))


def island_of(record: records.Joined) -> Island:
    """Return an incarnation as it joins."""
    return Island(
        name=record.island,
        incarnation=record.incarnation,
        session=record.session,
        tokens_per_step=record.tokens_per_step,
        sequences_per_step=record.sequences_per_step,
    )


def joined(state: State, island: Island, carried: records.Carrying | None) -> State:
    """Return the state with a new incarnation; recovery applies it too. carried: what
    it brings from an earlier term, whose progress includes some of its steps."""
    if carried is not None:
        others = state.carried_progress - carried.counted_tokens
        state = replace(state, carried_progress=others)
        island = replace(
            island, steps=carried.steps, sequences_granted=carried.sequences_granted
        )
    before = state.islands.get(island.name)
    if before is not None:
        island = replace(
            island,
            tokens_before=before.computed_tokens,
            joins=before.joins + 1,
            quarantined=before.quarantined,
            fruitless=before.fruitless,
        )
    state = with_island(state, island)
    state = replace(
        state,
        in_merges={**state.in_merges, island.name: ()},
        returning=tuple(name for name in state.returning if name != island.name),
    )
    for fragment in state.fragments:
        opened = ledger.open_account(fragment, island, carrying=carried is not None)
        state = with_fragment(state, opened)
    return state


def _join(turn: Turn, event: Hello, fenced: Island | None) -> None:
    """Let an incarnation in. fenced: the one before, which is to hear that it ended."""
    config, before = turn.config, turn.state.islands.get(event.island)
    carrying, carried = is_carrying(turn.state, event), None
    if carrying:
        counted = claims.counted_tokens(config, event, known=before is not None)
        carried = records.Carrying(
            steps=event.steps,
            sequences_granted=event.sequences_granted,
            counted_tokens=counted,
        )
    record = records.Joined(
        island=event.island,
        incarnation=event.incarnation,
        session=event.session,
        tokens_per_step=event.tokens_per_step,
        sequences_per_step=event.sequences_per_step,
        carried=carried,
    )
    island = island_of(record)
    island = replace(
        island,
        step_seconds=claims.believed_step_s(config, event),
        lookahead=event.lookahead,
        gives_at=_gives_at(config, event),
        phase=event.phase,
        wall_time=claims.joining(config, island, before, turn.now, carrying=carrying),
        records_through=event.records_through if carrying else 0,
    )
    if turn.state.returning:
        schedule.reunite(turn)
    turn.state = joined(turn.state, island, carried)
    alive(turn, schedule.restart(turn.state.islands[event.island]))
    turn.persist(record)
    # Before the one before hears of its end.
    forget(turn, event.island, event.incarnation)
    if fenced is not None:
        refused = Refused(
            code="fenced",
            message=f"island {event.island!r} is incarnation {event.incarnation} now, "
            f"this is {fenced.incarnation}; stop this process",
        )
        turn_away(turn, fenced.name, fenced.session, refused)
    _welcome(turn, event, resumed=False)
    leases.top_up(turn, event.island)


def forget(turn: Turn, name: str, before: int) -> None:
    """Have holders take nothing more of the incarnations of an island below `before`,
    and give them nothing."""
    deltas = tuple(
        delta.key(fragment.index)
        for fragment in turn.state.fragments
        for delta in (*fragment.left_behind, *fragment.merging)
    )
    turn.effects.append(Forget(island=name, before=before, kept=deltas))


def _gives_at(config: PolicyConfig, event: Hello) -> tuple[str, ...]:
    """Return where an island gives publishes: one address for each of its hosts at
    most, since every publish tells its region of them."""
    return event.gives_at[: config.hosts.get(event.island, 1)]


def _resume(turn: Turn, known: Island, event: Hello) -> None:
    name, phase, config = event.island, event.phase, turn.config
    if phase in BEGINNING and known.phase not in BEGINNING:
        phase = known.phase  # A late hello, from before its first step.
    island = replace(
        known,
        phase=phase,
        lookahead=event.lookahead,
        gives_at=_gives_at(config, event),
        # A restarted coordinator does not know which records are on its tape.
        records_through=max(known.records_through, event.records_through),
    )
    alive(turn, island)
    _welcome(turn, event, resumed=True)
    turn.note(records.Resumed(**known.who, steps=event.steps))
    leases.regrant(turn, island, event.sequences_granted)
    # A late hello may also list takes of an earlier term.
    earlier = schedule.ticks_before(turn.config, turn.state.books)
    held = {take.fragment: take for take in event.outstanding if take.tick > earlier}
    fleet = Fleet(turn.config, turn.state)
    for fragment in turn.state.fragments:
        taken = held.get(fragment.index)
        if taken is None:
            fragment = without_take(turn, fragment, fleet, name)
        else:
            recorded = taken.seq <= island.records_through
            fragment = with_take(turn, fragment, fleet, name, taken, recorded=recorded)
        turn.put(fragment)


def _absent(turn: Turn, island: Island, why: records.AbsentFor) -> None:
    turn.put(replace(island, status=ISLAND.move(island.status, "fall silent")))
    turn.note(records.Absent(**island.who, why=why))


def _welcome(turn: Turn, event: Hello, *, resumed: bool) -> None:
    state, fragments = turn.state, range(turn.config.fragments)
    welcome = Welcome(
        run_id=turn.config.run_id,
        term=state.term,
        resumed=resumed,
        versions=tuple(fragment.version for fragment in state.fragments),
        term_name=state.term_name,
        anew=tuple(fragments) if is_carrying(state, event) else (),
        next_position=state.next_position,
    )
    turn.tell(event.session, welcome)
