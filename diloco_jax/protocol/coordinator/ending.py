"""The end of a run, or of an island before it: islands stop, open steps are merged,
books are closed; and what extends a run that is over.

Deltas asked for before the end are merged by the usual rules. Then the flush merges
every fragment once, from all live islands that have open steps in it, and with what was
left behind at goodbyes. As many fragments of a worker are open at once as memory has
room for: else some deltas of each could fill it, and none would ever have all of its.
While no delta comes, one more is opened now and then, so that an island that hangs does
not keep the others' deltas out.

An island that stops before the run does is asked at once for all its open steps, and
may leave once those deltas have arrived (`takes.leave_behind`). No tick counts on it.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import fragments, members, schedule
from diloco_jax.protocol.coordinator.islands import Island
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import (
    FRAGMENT,
    RUN,
    Account,
    Fragment,
    PolicyConfig,
    State,
    Turn,
    with_fragment,
)
from diloco_jax.protocol.holding import deal
from diloco_jax.protocol.messages import EndReason, Finished, MayLeave, Stop

LATE = 0.1
"""Share of a lease by which its end may be noticed late. If it is more, the coordinator
was stopped itself."""
OPEN_BY = 0.5
"""Share of the flush's time in which all fragments are opened for all islands though no
delta comes. What has not come by then hangs: in the rest of the time, those are merged
twice that are here and made steps after their takes."""


def stop(turn: Turn) -> None:
    """Stop the run, which has its tokens: no island is to make more steps."""
    phase = RUN.move(turn.state.phase, "stop")
    turn.set(phase=phase, deadline=turn.now + turn.config.lease_s)
    turn.persist(records.Stopping(tokens=turn.state.progress_tokens))
    # Silent islands are told too: their connections may still work.
    for island in turn.state.islands.values():
        if island.status != "gone":
            turn.tell(island.session, Stop())


def awake(turn: Turn) -> None:
    """Let leases begin anew, if the coordinator itself was stopped for so long that
    they ran out, or its clock jumped. It first hears what has come meanwhile, so that
    nobody loses the last steps. What has not come by then hangs, and a flush has as
    much time after that as ever."""
    config, state = turn.config, turn.state
    if state.phase not in ("stopping", "flushing"):
        return
    ends = (i.lease_until for i in state.islands.values() if i.status == "live")
    ended = min(ends, default=turn.now)
    if turn.now - ended <= LATE * config.lease_s:
        return
    until = turn.now + config.lease_s
    for island in state.islands.values():
        if island.status != "gone" and ended <= island.lease_until < until:
            turn.put(replace(island, lease_until=until))
    if state.phase == "stopping":
        turn.set(deadline=max(state.deadline, until))
        return
    hangs_at = max(state.hangs_at, until)
    turn.set(deadline=hangs_at + (1.0 - OPEN_BY) * config.flush_s, hangs_at=hangs_at)


def late_s(config: PolicyConfig, state: State) -> float:
    """Return the time for which a silent island is awaited beyond its lease. Up to
    that, `awake` cannot tell that the coordinator itself was stopped, and what the
    island said meanwhile is yet to be heard."""
    ends = state.phase in ("stopping", "flushing")
    return LATE * config.lease_s if ends else 0.0


def awaited(state: State) -> tuple[str, ...]:
    """Return the islands that have not stopped yet. An absent island is awaited too,
    up to the deadline, and one of the term before: it may return with steps that can
    still be merged."""
    training = (
        name
        for name, island in state.islands.items()
        if island.status != "gone"
        and island.phase in ("training", "stopped")
        and (island.status, island.phase) != ("live", "stopped")
    )
    return (*training, *state.returning)


def wait(turn: Turn) -> None:
    """Let the flush, which is under way, wait from now."""
    until = turn.now + turn.config.flush_s
    pause_s = _pause_s(turn.config, len(turn.state.islands.standing.answering))
    hangs_at = until - (1.0 - OPEN_BY) * turn.config.flush_s
    turn.set(deadline=until, opens_at=turn.now + pause_s, hangs_at=hangs_at)


def soonest(state: State, now: float) -> float:
    """Return the next time at which time alone ends the wait."""
    if state.phase not in ("stopping", "flushing"):
        return math.inf
    times = [state.deadline]
    if state.phase == "flushing":
        absent = map(state.islands.__getitem__, state.islands.standing.absent)
        times += [state.opens_at, state.hangs_at]
        times += [island.lease_until for island in absent]
    return min((time for time in times if now < time), default=math.inf)


def flush(
    turn: Turn, fragment: Fragment, live: tuple[str, ...], *, hurry: bool
) -> None:
    """Open an idle fragment, once, for all live islands that have open steps in it.

    Takes made before the stop are merged first, by the usual rules: an island that
    made more steps after its take cannot take again before that merge. If fewer
    islands than a quorum have such takes, or they have not come for a time, those
    deltas enter the flush, and the later steps enter a second merge of it.
    """
    if fragment.phase != "idle":
        return
    config, state, now = turn.config, turn.state, turn.now
    islands, accounts = state.islands, fragment.accounts
    unsettled = tuple(n for n in live if accounts[n].start < islands[n].steps)
    if hurry:
        unsettled = tuple(n for n in unsettled if _is_here(accounts[n]))
    if not unsettled and not fragment.left_behind:
        if hurry or not _more_may_come(state, fragment, now):
            phase = FRAGMENT.move(fragment.phase, "flush")
            turn.put(replace(fragment, phase=phase))
        return
    if unsettled and all(_keeps_nobody(islands[n], accounts[n]) for n in unsettled):
        return  # Their answers to refusals are to come.
    early = tuple(n for n in unsettled if _went_on(islands[n], accounts[n]))
    late = now >= state.hangs_at
    if late:
        # What hangs must not keep the others' last steps out.
        early = tuple(n for n in early if _is_here(accounts[n]))
    final = hurry or len(early) < config.quorum
    if not final and not all(_is_here(accounts[n]) for n in early):
        return  # The deltas are on their way.
    at_once = _at_once(config, len(live))
    if now < state.opens_at and _busy(config, state, fragment) >= at_once and not hurry:
        return
    turn.set(opens_at=now + _pause_s(config, len(live)))
    asked = unsettled if final and not (late and early) else early
    schedule.advance(turn)
    fragment = replace(fragment, final=final)
    fleet = Fleet(config, turn.state)
    turn.put(fragments.open_tick(turn, fragment, fleet, turn.state.tick, asked))


def is_over(state: State, fragment: Fragment, now: float) -> bool:
    """Tell whether a fragment that is open in the flush waits no longer: the flush's
    time has passed, or what it waits for hangs, and some that are here have steps for
    another merge."""
    if now < state.hangs_at:
        return False
    return now >= state.deadline or any(
        _has_more(state.islands[name], account)
        for name, account in fragment.accounts.items()
    )


def _has_more(island: Island, account: Account) -> bool:
    """Tell whether a live island has steps that no outstanding delta holds, and none
    that hangs."""
    if island.status != "live" or account.start >= island.steps:
        return False
    here = _is_here(account) and _went_on(island, account)
    return account.take is None or here


def _busy(config: PolicyConfig, state: State, fragment: Fragment) -> int:
    """Return the fragments of the same worker that wait for deltas or are merged."""
    dealt = deal(config.fragment_sizes, config.workers)
    busy = (f.index for f in state.fragments if f.phase in ("open", "merging"))
    return sum(dealt[index] == dealt[fragment.index] for index in busy)


def _at_once(config: PolicyConfig, islands: int) -> int:
    """Return the fragments of a worker for whose deltas, of so many islands, its memory
    has room."""
    needed = config.room_each * islands
    return max(1, config.merge_buffer_bytes // needed) if needed else config.fragments


def _pause_s(config: PolicyConfig, islands: int) -> float:
    """Return the time without any delta after which one more fragment is opened."""
    rounds = math.ceil(config.fragments / config.workers / _at_once(config, islands))
    return OPEN_BY * config.flush_s / rounds


def _more_may_come(state: State, fragment: Fragment, now: float) -> bool:
    """Tell whether the last steps of an island are to come: it has not stopped yet, or
    has lost its connection, or its coordinator, within its lease. A blink of a link is
    to cost nobody its last steps."""
    for name, island in state.islands.items():
        if island.status == "live" and island.phase == "training":
            return True
        if island.status == "absent" and now < island.lease_until:
            stopped = island.phase == "stopped"
            if not stopped or fragment.accounts[name].start < island.steps:
                return True
    return False


def _keeps_nobody(island: Island, account: Account) -> bool:
    """Tell whether nothing of the island can be merged before it has answered."""
    take = account.take
    return take is not None and bool(take.refused or island.quarantined)


def _is_here(account: Account) -> bool:
    return account.take is not None and account.take.ready


def _went_on(island: Island, account: Account) -> bool:
    """Tell whether the island made steps after an outstanding take that may merge."""
    take = account.take
    if take is None or take.end is None or take.refused:
        return False
    return take.end < island.steps


def finish(turn: Turn) -> None:
    """End the run after its last merge: end all incarnations and tell the islands."""
    _alert_at_end(turn)
    left = [i for i in turn.state.islands.values() if i.status != "gone"]
    for island in left:
        reason: EndReason = "finished" if island.status == "live" else "absent"
        members.end(turn, island.name, reason)
    turn.set(phase=RUN.move(turn.state.phase, "finish"))
    turn.persist(records.Finished())
    for island in left:
        turn.tell(island.session, Finished())


def extend(turn: Turn) -> None:
    """Let a run that is over go on to the tokens of its config. All its incarnations
    have ended; every fragment goes on from its flushed version."""
    total = turn.config.total_tokens
    if turn.state.phase == "done" and turn.state.progress_tokens < total:
        turn.persist(records.Extended(total_tokens=total))
        turn.state = extended(turn.state)
        schedule.reserve(turn)


def extended(state: State) -> State:
    """Return the state of a run that is over as it goes on, with a whole cycle."""
    tick = state.tick - state.tick % -len(state.fragments)
    for fragment in state.fragments:
        phase = fragment.phase
        if phase == "done":
            phase = FRAGMENT.move(phase, "extend")
        state = with_fragment(state, replace(fragment, phase=phase, final=False))
    return replace(state, phase=RUN.move(state.phase, "extend"), tick=tick)


def island_stopped(turn: Turn, name: str) -> None:
    """Ask a stopped island for its open steps; if it has none, let it leave.

    Called after each of its reports and deltas.
    """
    state, island = turn.state, turn.state.islands[name]
    if island.phase != "stopped" or state.phase != "running":
        return
    if state.progress_tokens >= turn.config.total_tokens:
        return  # The run is about to stop, too.
    wanted = [
        f.index
        for f in state.fragments
        if (account := f.accounts[name]).take is None and account.start < island.steps
    ]
    if not wanted:
        if not any(_is_awaited(f, name, island.steps) for f in state.fragments):
            turn.tell(island.session, MayLeave())
        return
    ticks = schedule.skip_cycle(turn)
    fleet = Fleet(turn.config, turn.state)
    asked = tuple(records.Asked(fragment=i, tick=ticks[i]) for i in wanted)
    turn.note(records.Leaving(**island.who, asked=asked))
    for i in wanted:
        turn.put(fragments.ask(turn, state.fragments[i], fleet, (name,), ticks[i]))


def _is_awaited(fragment: Fragment, name: str, steps: int) -> bool:
    """Tell whether a delta of the island is on its way, or is in a merge after which
    the island can be asked for the steps behind it."""
    take = fragment.accounts[name].take
    if take is None:
        return False
    if take.end is None or not take.ready:
        return True
    return fragment.phase == "merging" and take.end < steps


def _alert_at_end(turn: Turn) -> None:
    """Report islands that were live when the run ended and have unmerged steps.

    To be called at the end of the flush, before open steps are booked as lost.
    """
    open_steps = {
        name
        for name, island in turn.state.islands.items()
        if island.status == "live"
        for fragment in turn.state.fragments
        if fragment.accounts[name].start < island.steps
    }
    if open_steps:
        turn.alert(
            f"the run ended without all that {', '.join(sorted(open_steps))} computed: "
            f"for {turn.config.flush_s:g} s no delta came, and the open steps are lost "
            f"(finished); look at their logs and links; a longer "
            f"placement.time_budget_s waits longer"
        )
