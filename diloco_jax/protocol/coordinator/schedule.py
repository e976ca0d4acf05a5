"""Pacing: the next tick, its time and fragment, and the speeds of the islands.

Tick n is due when the K-th fastest live island has made floor(n H / P) -
floor((n - 1) H / P) steps since the last tick (or since it joined). A tick's number
identifies takes, so it is never used twice, not even after a crash: numbers are
durably reserved before they are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.events import Effect, Persist
from diloco_jax.protocol.coordinator.islands import Island, Islands
from diloco_jax.protocol.coordinator.state import PolicyConfig, State

ALIKE = 1.5
"""Largest step time of an island of about the pacing speed, in pacing step times."""
LONGER_STEP = 1.25
"""Duration of a slow step, as a multiple of the usual one."""
LONGER_TRANSFER = 1.25
"""Duration of a slow transfer, as a multiple of the usual one."""
CYCLES_RESERVED = 16
"""Cycles whose ticks one durable record reserves."""
TICKS_PER_TERM = 1_000_000_000
"""Bound on the ticks of one term: a new term, which does not know the earlier numbers,
begins beyond it."""


def tick_is_due(config: PolicyConfig, state: State, now: float) -> bool:
    """Tell whether the pacing island has made the steps of the next tick, and no absent
    island is waited for, nor one of the term before."""
    fleet = state.islands.standing
    if now < state.reunion_until and (fleet.absent or state.returning):
        return False
    steps = steps_to_tick(config, state.tick + 1)
    reached = 0
    for island in map(state.islands.__getitem__, fleet.counted):
        if island.steps - island.steps_at_tick >= steps:
            reached += 1
    return reached >= config.quorum


def steps_to_tick(config: PolicyConfig, tick: int) -> int:
    """Return the steps between tick - 1 and tick (ticks count from 1)."""
    cycle, fragments = config.steps_per_cycle, config.fragments
    return tick * cycle // fragments - (tick - 1) * cycle // fragments


def fragment_of(config: PolicyConfig, tick: int) -> int:
    """Return the index of a tick's fragment."""
    return (tick - 1) % config.fragments


def advance(config: PolicyConfig, state: State) -> tuple[State, list[Effect]]:
    """Advance to the next tick and lower every island's step counter by its steps."""
    steps, longest = steps_to_tick(config, state.tick + 1), _longest_tick(config)
    passed = [_passed(island, steps, longest) for island in state.islands.values()]
    state = replace(state, islands=Islands(passed))
    return reserved(config, replace(state, tick=state.tick + 1))


def skip_cycle(
    config: PolicyConfig, state: State
) -> tuple[dict[int, int], State, list[Effect]]:
    """Return an unused tick number for every fragment and never use it again; pacing
    is not affected."""
    last = state.tick + config.fragments
    ticks = {fragment_of(config, tick): tick for tick in range(last, state.tick, -1)}
    return ticks, *reserved(config, replace(state, tick=last))


def reserved(config: PolicyConfig, state: State) -> tuple[State, list[Effect]]:
    """Return the state whose tick is durably reserved, so that no life of a coordinator
    uses it, or one before it, again. After a crash it may not be."""
    if state.tick <= state.ticks_reserved:
        return state, []
    through = state.tick + CYCLES_RESERVED * config.fragments
    state = replace(state, ticks_reserved=through)
    return state, [Persist(record=records.Ticks(through=through))]


def after_crash(config: PolicyConfig, state: State) -> State:
    """Return the state at the next tick of the same fragment that no island was asked
    for before the crash."""
    cycles = -(-max(state.ticks_reserved - state.tick, 0) // config.fragments)
    return replace(state, tick=state.tick + cycles * config.fragments)


def begin_term(config: PolicyConfig, state: State, term: int) -> State:
    """Return the state before the first tick of a term."""
    tick = ticks_before(config, term)
    return replace(state, tick=tick, ticks_reserved=tick)


def ticks_before(config: PolicyConfig, term: int) -> int:
    """Return the highest possible tick number of earlier terms, in whole cycles."""
    cycles = -(-(term - 1) * TICKS_PER_TERM // config.fragments)
    return cycles * config.fragments


def restart(island: Island) -> Island:
    """Return the island with its step counter at zero."""
    return replace(island, steps_at_tick=island.steps)


def reunite(config: PolicyConfig, state: State, now: float) -> State:
    """Return the state as an absent island returns, or one of the term before. If all
    islands were absent, because the coordinator or its network was down, ticks wait for
    the others for a short time. Otherwise the first to return would merge alone, and
    open deltas might go stale."""
    if state.islands.standing.counted:
        return state
    return replace(state, reunion_until=now + config.reunion_s)


class Fleet:
    """The islands of one state."""

    def __init__(self, config: PolicyConfig, state: State) -> None:
        self._config, self._state = config, state
        self._running = state.phase == "running"
        self.quarantined = state.islands.standing.quarantined
        """Islands of whose deltas none may be merged."""
        self._latest_s: float | None = None

    def is_live(self, name: str) -> bool:
        """Tell whether the island can be waited for."""
        island = self._state.islands[name]
        return island.counted if self._running else island.answers

    def highest_rate(self, tokens: int) -> float:
        """Return the highest learning rate since a version with so many tokens, at the
        points of the schedule around; infinity if the schedule is not known."""
        rates, whole = self._config.rates, self._config.total_tokens
        if not rates:
            return math.inf
        then, now = self._state.carried_progress + tokens, self._state.progress_tokens
        parts = len(rates) - 1
        first = min(max(then, 0) * parts // whole, parts)
        # Islands may know of more progress than the coordinator does.
        last = max(now * parts // whole, first) + 1
        return max(rates[first : last + 1])

    def token_rate(self, name: str) -> float:
        """Return the island's tokens per second; 0 while its speed is unknown."""
        return self._state.islands[name].tokens_per_second

    def boundaries_after(self, name: str) -> int:
        """Return the boundaries by which an island must delay a take requested now.

        An island that could take at once waits for islands of about the pacing speed
        that take some boundaries later: otherwise it would be merged without them. It
        waits for a cycle at most."""
        if self._latest_s is None:
            self._latest_s = longest_lead_seconds(self._config, self._state)
        island = self._state.islands[name]
        step_s = island.believed_step_s
        if not (self._latest_s and island.counted and step_s):
            return 0
        after = round((self._latest_s - island.lead_seconds) / step_s)
        return max(0, min(after, self._config.steps_per_cycle))

    def step_seconds(self) -> float:
        """Return the step time of the pacing island, in seconds."""
        return pacing_step_seconds(self._config, self._state)

    def alike(self, names: AbstractSet[str]) -> AbstractSet[str]:
        """Return those of the islands whose speed is about the pacing one, or
        unknown."""
        return names & alike(self._config, self._state).keys()

    def take_seconds(self, fit: AbstractSet[str]) -> float:
        """Return the seconds from a request until islands of about the pacing speed
        have taken, the slowest after a slow step; 0 if none, or no speed, is known."""
        steps_s = [self._state.islands[name].believed_step_s for name in fit]
        if not any(steps_s):
            return 0.0
        lead_s = longest_lead_seconds(self._config, self._state)
        return lead_s + LONGER_STEP * max(steps_s)


def alike(config: PolicyConfig, state: State) -> dict[str, Island]:
    """Return the counted islands whose speed is about the pacing one, or unknown."""
    slowest = ALIKE * pacing_step_seconds(config, state)
    counted = ((name, state.islands[name]) for name in state.islands.standing.counted)
    return {name: i for name, i in counted if i.believed_step_s <= slowest}


def longest_lead_seconds(config: PolicyConfig, state: State) -> float:
    """Return the longest lead of islands of about the pacing speed, in seconds; see
    `Fleet.boundaries_after`."""
    found = alike(config, state).values()
    return max((island.lead_seconds for island in found), default=0.0)


def pacing_step_seconds(config: PolicyConfig, state: State) -> float:
    """Return the step time of the K-th fastest counted island; 0 if none is known."""
    counted = map(state.islands.__getitem__, state.islands.standing.counted)
    return pace(config.quorum, (island.believed_step_s for island in counted))


def pace(quorum: int, step_seconds: Iterable[float]) -> float:
    """Return the K-th shortest of the known (positive) step times, or the longest if
    fewer are known; 0 if none is."""
    known = sorted(seconds for seconds in step_seconds if seconds > 0)
    return known[min(quorum, len(known)) - 1] if known else 0.0


def _passed(island: Island, steps: int, longest: int) -> Island:
    """Return the island after a tick of that many steps: its counter keeps no lead, and
    lags by the longest tick's steps at most.

    If counters restarted instead, M islands out of phase would cause M ticks while each
    makes the steps of one: every island's next step would count as a further one.
    """
    counter = island.steps - island.steps_at_tick - steps
    return replace(island, steps_at_tick=island.steps - max(-longest, min(counter, 0)))


def _longest_tick(config: PolicyConfig) -> int:
    return -(-config.steps_per_cycle // config.fragments)
