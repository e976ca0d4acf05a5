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
from diloco_jax.protocol.coordinator.events import Effect, Tell
from diloco_jax.protocol.coordinator.state import (
    Fragment,
    PolicyConfig,
    State,
    with_island,
)
from diloco_jax.protocol.holding import CycleKept, KeepFragment
from diloco_jax.protocol.messages import Watch

Step = tuple[State, list[Effect]]


def cycle_of(config: PolicyConfig, tick: int) -> int:
    """Return the cycle of a tick; 0 before the first one."""
    return -(-tick // config.fragments)


def present(config: PolicyConfig, state: State) -> int:
    """Return the cycle in which the run is, at least 1: no fragment is beyond it."""
    return max(1, cycle_of(config, state.tick))


def can_begin(state: State) -> bool:
    """Tell whether ticks come in turn, so that a cycle is of one moment."""
    return state.phase == "running"


def ask(config: PolicyConfig, state: State) -> Step:
    """Begin to keep the present cycle, unless another one is being kept or the run has
    stopped. Its ticks up to now are of no merge, in no life of the coordinator."""
    if state.keeping or not can_begin(state):
        return state, []
    state, effects = schedule.reserved(config, state)
    return _begin(config, state), effects


def kept(state: State, event: CycleKept) -> State:
    """Note that a cycle is on disk, or was given up: the next one may be kept."""
    if event.cycle != state.kept_cycle:
        return state
    return replace(state, keeping=False, unkept=())


def advance(config: PolicyConfig, before: State, state: State) -> Step:
    """Begin to keep a cycle when it is due, and keep the fragments that have reached
    it. before: the state before this event."""
    every = config.export_every
    ticked = state.tick != before.tick and can_begin(state)
    if every and ticked and not state.keeping:
        now, last = cycle_of(config, state.tick), state.kept_cycle
        if now // every > last // every:
            state = _begin(config, state)
    if not state.unkept or _same(before, state):
        return state, []
    cycle, waiting, effects = state.kept_cycle, [], list[Effect]()
    for index in state.unkept:
        fragment = state.fragments[index]
        if not is_at(config, state, fragment, cycle):
            waiting.append(index)
            continue
        effects.append(
            KeepFragment(
                cycle=cycle,
                fragment=index,
                version=fragment.version,
                merges=fragment.merges,
                tokens=ledger.merged_into(fragment),
            )
        )
    return replace(state, unkept=tuple(waiting)), effects


def forgotten(state: State) -> State:
    """Return the state after a crash: an unfinished cycle is kept no further, and no
    island watches one.
    """
    return replace(state, keeping=False, unkept=(), unwatched=())


def is_at(config: PolicyConfig, state: State, fragment: Fragment, cycle: int) -> bool:
    """Tell whether no merge of the cycle can follow the fragment's version."""
    turn = (cycle - 1) * config.fragments + fragment.index + 1
    if fragment.phase in ("open", "merging"):
        return fragment.tick > turn
    # Every later tick has a higher number.
    return fragment.phase == "done" or state.tick >= turn


def _begin(config: PolicyConfig, state: State) -> State:
    return replace(
        state,
        keeping=True,
        kept_cycle=present(config, state),
        unkept=tuple(range(config.fragments)),
    )


def _same(before: State, state: State) -> bool:
    """Tell whether nothing happened that could bring a fragment to a cycle: each tick
    replaces a fragment, too."""
    return before.unkept is state.unkept and before.fragments is state.fragments


def watch(config: PolicyConfig, before: State, state: State) -> Step:
    """Give a turn when a cycle is due, and name to that island the versions that are
    sure. before: the state before this event."""
    every = config.watch_every
    ticked = state.tick != before.tick and can_begin(state)
    if every and ticked and not _at_it(state):
        now = cycle_of(config, state.tick)
        if now % every == 0 and now > state.watched_cycle:
            state = _give_turn(config, state, now)
    if not state.unwatched:
        return state, []
    if before.unwatched is state.unwatched and before.fragments is state.fragments:
        return state, []
    waiting, effects = [], list[Effect]()
    session = state.islands[state.watcher].session
    for index in state.unwatched:
        fragment, cycle = state.fragments[index], state.watched_cycle
        if not is_at(config, state, fragment, cycle):
            waiting.append(index)
            continue
        watch = Watch(cycle=cycle, fragment=index, version=fragment.version)
        effects.append(Tell(session=session, message=watch))
    return replace(state, unwatched=tuple(waiting)), effects


def _at_it(state: State) -> bool:
    """Tell whether an island that trains has not heard of all versions yet."""
    return bool(state.unwatched) and state.islands[state.watcher].counted


def _give_turn(config: PolicyConfig, state: State, cycle: int) -> State:
    """Return the state with the next island at this cycle, if any can be."""
    fit = schedule.alike(config, state)
    able = sorted(name for name, island in fit.items() if island.watches)
    if not able:
        return replace(state, unwatched=())
    name = ([name for name in able if name > state.watcher] or able)[0]
    island = replace(state.islands[name], watched_cycle=cycle)
    return replace(
        with_island(state, island),
        watcher=name,
        watched_cycle=cycle,
        unwatched=tuple(range(config.fragments)),
    )
