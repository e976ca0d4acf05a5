"""The departure of an island that stops before the run does.

The island is asked at once for all its open steps, without waiting for a tick, and may
leave once those deltas have arrived. No tick counts on it. Its deltas wait for the next
merges of their fragments, which no longer need the island (`takes.leave_behind`).
"""

from __future__ import annotations

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import fragments, schedule
from diloco_jax.protocol.coordinator.events import Effect, Note, Tell
from diloco_jax.protocol.coordinator.schedule import Fleet
from diloco_jax.protocol.coordinator.state import (
    Fragment,
    PolicyConfig,
    State,
    with_fragment,
)
from diloco_jax.protocol.messages import MayLeave

Step = tuple[State, list[Effect]]


def stopped(config: PolicyConfig, state: State, name: str) -> Step:
    """Ask a stopped island for its open steps; if it has none, let it leave.

    Called after each of its reports and deltas.
    """
    island = state.islands[name]
    if island.phase != "stopped" or state.phase != "running":
        return state, []
    if state.progress_tokens >= config.total_tokens:
        return state, []  # The run is about to stop, too.
    wanted = [
        f.index
        for f in state.fragments
        if (account := f.accounts[name]).take is None and account.start < island.steps
    ]
    if not wanted:
        if any(_is_awaited(f, name, island.steps) for f in state.fragments):
            return state, []
        return state, [Tell(session=island.session, message=MayLeave())]
    ticks, state, effects = schedule.skip_cycle(config, state)
    fleet = Fleet(config, state)
    asked = records.Leaving(
        island=name,
        incarnation=island.incarnation,
        asked=tuple(records.Asked(fragment=i, tick=ticks[i]) for i in wanted),
    )
    effects.append(Note(record=asked))
    for index in wanted:
        fragment, asks = fragments.ask(
            state.fragments[index], fleet, (name,), ticks[index]
        )
        state = with_fragment(state, fragment)
        effects += asks
    return state, effects


def _is_awaited(fragment: Fragment, name: str, steps: int) -> bool:
    """Tell whether a delta of the island is on its way, or is in a merge after which
    the island can be asked for the steps behind it."""
    take = fragment.accounts[name].take
    if take is None:
        return False
    if take.end is None or not take.ready:
        return True
    return fragment.phase == "merging" and take.end < steps
