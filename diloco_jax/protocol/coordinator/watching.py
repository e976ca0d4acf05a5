"""The merged model, watched while it trains: which cycle, and whose turn it is.

In every cycle whose number `watch_every` divides, one island copies the anchors of that
cycle (`cycles.is_at`), each when its version is sure, and evaluates them. Islands of
about the pacing speed that are not at it take turns, by name: a slower one would miss
versions. One cycle is asked for at a time. Nothing waits for an island, and nothing is
durable: a cycle that an island misses has no point on the curve.
"""

from __future__ import annotations

from msgspec.structs import replace

from diloco_jax.protocol.coordinator import cycles, schedule
from diloco_jax.protocol.coordinator.events import Effect, Tell
from diloco_jax.protocol.coordinator.state import PolicyConfig, State, with_island
from diloco_jax.protocol.messages import Watch

Step = tuple[State, list[Effect]]


def advance(config: PolicyConfig, before: State, state: State) -> Step:
    """Give a turn when a cycle is due, and name to that island the versions that are
    sure. before: the state before this event."""
    every = config.watch_every
    ticked = state.tick != before.tick and cycles.can_begin(state)
    if every and ticked and not _at_it(state):
        now = cycles.cycle_of(config, state.tick)
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
        if not cycles.is_at(config, state, fragment, cycle):
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
