"""Cycles of the merged model: kept for people, and watched while the run trains.

Cycle c has the ticks (c - 1) P + 1 to c P, and fragment f its turn at the f-th of them.
The cycle's version of a fragment is that of its last merge with a tick up to its turn,
whenever that merge ended. So all fragments of one cycle are of one moment of the
schedule, and nothing waits for them: each is kept once its version is sure, before its
next merge can replace it. One cycle is kept at a time, which bounds what is held. The
flush's ticks come out of turn: most of its merges are of no cycle, and no cycle begins
to be kept once the run has stopped. A run that is extended goes on with a new cycle.

In every cycle whose number `watch_every` divides, one island copies the anchors of that
cycle (`is_at`), each when its version is sure, and evaluates them. Islands of about the
pacing speed that are not at it take turns, by name: a slower one would miss versions.
One cycle is asked for at a time. Nothing waits for an island, and nothing is durable: a
cycle that an island misses has no point on the curve.
"""

from __future__ import annotations

from msgspec.structs import replace

from diloco_jax.protocol.coordinator import ledger, schedule
from diloco_jax.protocol.coordinator.state import Fragment, PolicyConfig, State, Turn
from diloco_jax.protocol.holding import CycleKept, KeepFragment
from diloco_jax.protocol.messages import Watch


def cycle_of(config: PolicyConfig, tick: int) -> int:
    """Return the cycle of a tick; 0 before the first one."""
    return -(-tick // config.fragments)


def present(config: PolicyConfig, state: State) -> int:
    """Return the cycle in which the run is, at least 1: no fragment is beyond it."""
    return max(1, cycle_of(config, state.tick))


def can_begin(state: State) -> bool:
    """Tell whether ticks come in turn, so that a cycle is of one moment."""
    return state.phase == "running"


def ask(turn: Turn) -> None:
    """Begin to keep the present cycle, unless another one is being kept or the run has
    stopped. Its ticks up to now are of no merge, in no life of the coordinator."""
    if not turn.state.keeping and can_begin(turn.state):
        schedule.reserve(turn)
        _begin(turn)


def kept(turn: Turn, event: CycleKept) -> None:
    """Note that a cycle is on disk, or was given up: the next one may be kept."""
    if event.cycle == turn.state.kept_cycle:
        turn.set(keeping=False, unkept=())


def advance(turn: Turn, before: State) -> None:
    """Begin to keep a cycle when it is due, and keep the fragments that have reached
    it. before: the state before this event."""
    every, state = turn.config.export_every, turn.state
    ticked = state.tick != before.tick and can_begin(state)
    if every and ticked and not state.keeping:
        now, last = cycle_of(turn.config, state.tick), state.kept_cycle
        if now // every > last // every:
            _begin(turn)
    cycle = turn.state.kept_cycle
    changed = before.unkept is not turn.state.unkept
    sure, waiting = _sure(turn, turn.state.unkept, cycle, before, changed=changed)
    for fragment in sure:
        keep = KeepFragment(
            cycle=cycle,
            fragment=fragment.index,
            version=fragment.version,
            merges=fragment.merges,
            tokens=ledger.merged_into(fragment),
        )
        turn.effects.append(keep)
    if sure:
        turn.set(unkept=waiting)


def _sure(
    turn: Turn, waiting: tuple[int, ...], cycle: int, before: State, *, changed: bool
) -> tuple[list[Fragment], tuple[int, ...]]:
    """Return those of the waiting fragments that are at a cycle, and the indices of the
    others. Each tick and merge replaces a fragment: else nothing has changed."""
    if not changed and before.fragments is turn.state.fragments:
        return [], waiting
    fragments = map(turn.state.fragments.__getitem__, waiting)
    sure = [f for f in fragments if is_at(turn.config, turn.state, f, cycle)]
    at_it = {fragment.index for fragment in sure}
    return sure, tuple(index for index in waiting if index not in at_it)


def is_at(config: PolicyConfig, state: State, fragment: Fragment, cycle: int) -> bool:
    """Tell whether no merge of the cycle can follow the fragment's version."""
    turn = (cycle - 1) * config.fragments + fragment.index + 1
    if fragment.phase in ("open", "merging"):
        return fragment.tick > turn
    # Every later tick has a higher number.
    return fragment.phase == "done" or state.tick >= turn


def _begin(turn: Turn) -> None:
    turn.set(
        keeping=True,
        kept_cycle=present(turn.config, turn.state),
        unkept=tuple(range(turn.config.fragments)),
    )


def watch(turn: Turn, before: State) -> None:
    """Give a turn when a cycle is due, and name to that island the versions that are
    sure. before: the state before this event."""
    every, state = turn.config.watch_every, turn.state
    ticked = state.tick != before.tick and can_begin(state)
    # An island that trains may not have heard of all versions yet.
    at_it = bool(state.unwatched) and state.islands[state.watcher].counted
    if every and ticked and not at_it:
        now = cycle_of(turn.config, state.tick)
        if now % every == 0 and now > state.watched_cycle:
            _give_turn(turn, now)
    state = turn.state
    changed = before.unwatched is not state.unwatched
    sure, waiting = _sure(
        turn, state.unwatched, state.watched_cycle, before, changed=changed
    )
    for fragment in sure:
        watched = Watch(
            cycle=state.watched_cycle, fragment=fragment.index, version=fragment.version
        )
        turn.tell(state.islands[state.watcher].session, watched)
    if sure:
        turn.set(unwatched=waiting)


def _give_turn(turn: Turn, cycle: int) -> None:
    """Give the next island its turn at this cycle, if any can be at it."""
    fit = schedule.Fleet(turn.config, turn.state).alike()
    able = sorted(name for name, island in fit.items() if island.watches)
    if not able:
        turn.set(unwatched=())
        return
    last = turn.state.watcher
    name = ([name for name in able if name > last] or able)[0]
    turn.put(replace(turn.state.islands[name], watched_cycle=cycle))
    everything = tuple(range(turn.config.fragments))
    turn.set(watcher=name, watched_cycle=cycle, unwatched=everything)
