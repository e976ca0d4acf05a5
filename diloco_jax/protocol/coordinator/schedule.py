"""Pacing: when the coordinator's next tick comes, and which fragment it is for.

Tick n comes when the K-th fastest live island has done floor(n H / P) -
floor((n - 1) H / P) further steps since its last one (or since it joined). A tick's
number names takes, so it is never used twice, not even after a crash: numbers are
reserved, durably, before they are used.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.events import Effect, Persist
from diloco_jax.protocol.coordinator.state import Island, PolicyConfig, State

ALIKE = 1.5
"""Step time over the pacing island's up to which an island is of about its speed."""
CYCLES_RESERVED = 16
"""Cycles whose ticks one durable record reserves."""
TICKS_PER_TERM = 1_000_000_000
"""More than a term has: a new one, which does not know what numbers there were, begins
beyond."""


def tick_is_due(config: PolicyConfig, state: State, now: float) -> bool:
    """Whether the pacing island has done the steps of the next tick, and nobody is
    waited for."""
    if now < state.reunion_until and any(
        island.status == "absent" for island in state.islands.values()
    ):
        return False
    steps = steps_to_tick(config, state.tick + 1)
    reached = 0
    for island in state.islands.values():
        if island.steps - island.steps_at_tick >= steps and island.counted:
            reached += 1
    return reached >= config.quorum


def steps_to_tick(config: PolicyConfig, tick: int) -> int:
    """Steps between tick - 1 and tick (ticks count from 1)."""
    cycle, fragments = config.steps_per_cycle, config.fragments
    return tick * cycle // fragments - (tick - 1) * cycle // fragments


def fragment_of(config: PolicyConfig, tick: int) -> int:
    """Index of the fragment that a tick is for."""
    return (tick - 1) % config.fragments


def advance(config: PolicyConfig, state: State) -> tuple[State, list[Effect]]:
    """The next tick: every island's step counter goes down by the tick's steps."""
    steps, longest = steps_to_tick(config, state.tick + 1), _longest_tick(config)
    islands = {
        name: _passed(island, steps, longest) for name, island in state.islands.items()
    }
    return _reserved(config, replace(state, tick=state.tick + 1, islands=islands))


def skip_cycle(
    config: PolicyConfig, state: State
) -> tuple[dict[int, int], State, list[Effect]]:
    """A number for every fragment that no tick has had or will have; pacing goes on as
    if nothing had been."""
    numbers = range(state.tick + 1, state.tick + 1 + config.fragments)
    ticks = {fragment_of(config, tick): tick for tick in numbers}
    return ticks, *_reserved(config, replace(state, tick=numbers[-1]))


def _reserved(config: PolicyConfig, state: State) -> tuple[State, list[Effect]]:
    if state.tick <= state.ticks_reserved:
        return state, []
    through = state.tick + CYCLES_RESERVED * config.fragments
    state = replace(state, ticks_reserved=through)
    return state, [Persist(record=records.Ticks(through=through))]


def after_crash(config: PolicyConfig, state: State) -> State:
    """The state at the first tick of the same fragment that nobody was asked for."""
    cycles = -(-max(state.ticks_reserved - state.tick, 0) // config.fragments)
    return replace(state, tick=state.tick + cycles * config.fragments)


def begin_term(config: PolicyConfig, state: State, term: int) -> State:
    """The state before the first tick of a term."""
    tick = ticks_before(config, term)
    return replace(state, tick=tick, ticks_reserved=tick)


def ticks_before(config: PolicyConfig, term: int) -> int:
    """The highest number that a tick of earlier terms can have: of whole cycles."""
    cycles = -(-(term - 1) * TICKS_PER_TERM // config.fragments)
    return cycles * config.fragments


def restart(island: Island) -> Island:
    """The island with its step counter at zero."""
    return replace(island, steps_at_tick=island.steps)


def reunite(config: PolicyConfig, state: State, now: float) -> State:
    """The state as an absent island comes back. If all were away, because the
    coordinator or its network was, ticks wait a little for the others: whoever is back
    first would otherwise merge without them, and their open deltas might go stale."""
    if any(island.counted for island in state.islands.values()):
        return state
    return replace(state, reunion_until=now + config.reunion_s)


def alike(config: PolicyConfig, state: State) -> dict[str, Island]:
    """Counted islands of about the pacing one's speed, and of none that is known."""
    slowest = ALIKE * pacing_step_seconds(config, state)
    return {
        name: island
        for name, island in state.islands.items()
        if island.counted and island.step_seconds <= slowest
    }


def longest_lead_seconds(config: PolicyConfig, state: State) -> float:
    """Of islands of about the pacing one's speed: see `Fleet.boundaries_after`."""
    found = alike(config, state).values()
    return max((island.lead_seconds for island in found), default=0.0)


def pacing_step_seconds(config: PolicyConfig, state: State) -> float:
    """Step time of the K-th fastest counted island; 0 if there is none yet."""
    counted = (island for island in state.islands.values() if island.counted)
    return pace(config.quorum, (island.step_seconds for island in counted))


def pace(quorum: int, step_seconds: Iterable[float]) -> float:
    """The K-th fastest of the known (positive) step times, or the slowest if they are
    fewer; 0 if there is none."""
    known = sorted(seconds for seconds in step_seconds if seconds > 0)
    return known[min(quorum, len(known)) - 1] if known else 0.0


def _passed(island: Island, steps: int, longest: int) -> Island:
    """The island after a tick of that many steps: it keeps no lead, and lags by the
    longest tick's steps at most.

    If counters restarted instead, M islands out of phase would make M ticks while each
    makes the steps of one: whoever ends a step next would have "done one further".
    """
    counter = island.steps - island.steps_at_tick - steps
    return replace(island, steps_at_tick=island.steps - max(-longest, min(counter, 0)))


def _longest_tick(config: PolicyConfig) -> int:
    return -(-config.steps_per_cycle // config.fragments)
