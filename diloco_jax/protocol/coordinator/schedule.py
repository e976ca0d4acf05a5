"""The schedule: ticks and the speeds they follow, and cycles of the merged model.

Tick n is due when the K-th fastest live island has made floor(n H / P) -
floor((n - 1) H / P) steps since the last tick (or since it joined). A tick's number
identifies takes, so it is never used twice, not even after a crash: numbers are
durably reserved before they are used.

Cycle c has the ticks (c - 1) P + 1 to c P, and fragment f its turn at the f-th of them.
The cycle's version of a fragment is that of its last merge with a tick up to its turn,
whenever that merge ended. So all fragments of one cycle are of one moment, and nothing
waits for them: each is kept, or copied by the island that watches, once its version is
sure (`is_at_cycle`). One cycle is kept at a time, and one watched, which bounds what is
held. The flush's ticks come out of turn: no cycle begins once the run has stopped.

Islands of about the pacing speed take turns to watch, by name: a slower one would miss
versions. Nothing of that is durable: a missed cycle has no point on the curve.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

from msgspec.structs import replace

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.protocol.coordinator.islands import Island, Islands
from diloco_jax.protocol.coordinator.state import Fragment, PolicyConfig, State, Turn
from diloco_jax.protocol.holding import CycleKept, KeepFragment
from diloco_jax.protocol.messages import Watch

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
    counted = map(state.islands.__getitem__, fleet.counted)
    reached = sum(island.steps - island.steps_at_tick >= steps for island in counted)
    return reached >= config.quorum


def steps_to_tick(config: PolicyConfig, tick: int) -> int:
    """Return the steps between tick - 1 and tick (ticks count from 1)."""
    cycle, fragments = config.steps_per_cycle, config.fragments
    return tick * cycle // fragments - (tick - 1) * cycle // fragments


def fragment_of(config: PolicyConfig, tick: int) -> int:
    """Return the index of a tick's fragment."""
    return (tick - 1) % config.fragments


def advance(turn: Turn) -> None:
    """Advance to the next tick and lower every island's step counter by its steps."""
    config, tick = turn.config, turn.state.tick + 1
    steps = steps_to_tick(config, tick)
    longest = -(-config.steps_per_cycle // config.fragments)
    passed = [_passed(island, steps, longest) for island in turn.state.islands.values()]
    turn.set(islands=Islands(passed), tick=tick)
    reserve(turn)


def skip_cycle(turn: Turn) -> dict[int, int]:
    """Return an unused tick number for every fragment and never use it again; pacing
    is not affected."""
    first = turn.state.tick + 1
    last = turn.state.tick + turn.config.fragments
    turn.set(tick=last)
    reserve(turn)
    return {fragment_of(turn.config, tick): tick for tick in range(first, last + 1)}


def reserve(turn: Turn) -> None:
    """Reserve the state's tick durably, so that no life of a coordinator uses it, or
    one before it, again. After a crash it may not be."""
    if turn.state.tick > turn.state.ticks_reserved:
        through = turn.state.tick + CYCLES_RESERVED * turn.config.fragments
        turn.set(ticks_reserved=through)
        turn.persist(records.Ticks(through=through))


def after_crash(config: PolicyConfig, state: State) -> State:
    """Return the state at the next tick of the same fragment that no island was asked
    for before the crash."""
    cycles = -(-max(state.ticks_reserved - state.tick, 0) // config.fragments)
    return replace(state, tick=state.tick + cycles * config.fragments)


def ticks_before(config: PolicyConfig, term: int) -> int:
    """Return the highest possible tick number of earlier terms, in whole cycles."""
    cycles = -(-(term - 1) * TICKS_PER_TERM // config.fragments)
    return cycles * config.fragments


def restart(island: Island) -> Island:
    """Return the island with its step counter at zero."""
    return replace(island, steps_at_tick=island.steps)


def reunite(turn: Turn) -> None:
    """Wait for others as an absent island returns, or one of the term before. If all
    islands were absent, because the coordinator or its network was down, ticks wait for
    the others for a short time. Otherwise the first to return would merge alone, and
    open deltas might go stale."""
    if not turn.state.islands.standing.counted:
        turn.set(reunion_until=turn.now + turn.config.reunion_s)


class Fleet:
    """The islands of one state."""

    def __init__(self, config: PolicyConfig, state: State) -> None:
        self._config, self._state = config, state
        self._running = state.phase == "running"
        self.quarantined = state.islands.standing.quarantined
        """Islands of whose deltas none may be merged."""

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
        island = self._state.islands[name]
        step_s = island.believed_step_s
        if not (island.counted and step_s):
            return 0
        waits_s = self.longest_lookahead_s - island.lookahead_seconds
        after = round(waits_s / step_s)
        return max(0, min(after, self._config.steps_per_cycle))

    def step_seconds(self) -> float:
        """Return the step time of the K-th fastest counted island, which paces; 0 if
        none is known."""
        times = (island.believed_step_s for island in self._counted())
        return pace(self._config.quorum, times)

    def alike(self) -> dict[str, Island]:
        """Return the counted islands whose speed is about the pacing one, or
        unknown."""
        slowest = ALIKE * self.step_seconds()
        return {i.name: i for i in self._counted() if i.believed_step_s <= slowest}

    def take_seconds(self, fit: Iterable[str]) -> float:
        """Return the seconds from a request until islands of about the pacing speed
        have taken, the slowest after a slow step; 0 if none, or no speed, is known."""
        steps_s = [self._state.islands[name].believed_step_s for name in fit]
        if not any(steps_s):
            return 0.0
        return self.longest_lookahead_s + LONGER_STEP * max(steps_s)

    @functools.cached_property
    def longest_lookahead_s(self) -> float:
        """Longest lookahead of islands of about the pacing speed, in seconds."""
        return max(island.lookahead_seconds for island in self.alike().values())

    def _counted(self) -> Iterable[Island]:
        islands = self._state.islands
        return map(islands.__getitem__, islands.standing.counted)


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


def cycle_of(config: PolicyConfig, tick: int) -> int:
    """Return the cycle of a tick; 0 before the first one."""
    return -(-tick // config.fragments)


def present_cycle(config: PolicyConfig, state: State) -> int:
    """Return the cycle in which the run is, at least 1: no fragment is beyond it."""
    return max(1, cycle_of(config, state.tick))


def can_keep_cycle(state: State) -> bool:
    """Tell whether ticks come in turn, so that a cycle is of one moment."""
    return state.phase == "running"


def ask_for_cycle(turn: Turn) -> None:
    """Begin to keep the present cycle, unless another one is being kept or the run has
    stopped. Its ticks up to now are of no merge, in no life of the coordinator."""
    if not turn.state.keeping and can_keep_cycle(turn.state):
        reserve(turn)
        _begin_cycle(turn)


def cycle_kept(turn: Turn, event: CycleKept) -> None:
    """Note that a cycle is on disk, or was given up: the next one may be kept."""
    if event.cycle == turn.state.kept_cycle:
        turn.set(keeping=False, unkept=())


def keep_cycles(turn: Turn, before: State) -> None:
    """Begin to keep a cycle when it is due, and keep the fragments that have reached
    it. before: the state before this event."""
    every, state = turn.config.export_every, turn.state
    ticked = state.tick != before.tick and can_keep_cycle(state)
    if every and ticked and not state.keeping:
        now, last = cycle_of(turn.config, state.tick), state.kept_cycle
        if now // every > last // every:
            _begin_cycle(turn)
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
    sure = [f for f in fragments if is_at_cycle(turn.config, turn.state, f, cycle)]
    at_it = {fragment.index for fragment in sure}
    return sure, tuple(index for index in waiting if index not in at_it)


def is_at_cycle(
    config: PolicyConfig, state: State, fragment: Fragment, cycle: int
) -> bool:
    """Tell whether no merge of the cycle can follow the fragment's version."""
    turn = (cycle - 1) * config.fragments + fragment.index + 1
    if fragment.phase in ("open", "merging"):
        return fragment.tick > turn
    # Every later tick has a higher number.
    return fragment.phase == "done" or state.tick >= turn


def _begin_cycle(turn: Turn) -> None:
    turn.set(
        keeping=True,
        kept_cycle=present_cycle(turn.config, turn.state),
        unkept=tuple(range(turn.config.fragments)),
    )


def watch_cycles(turn: Turn, before: State) -> None:
    """Give a turn when a cycle is due, and name to that island the versions that are
    sure. before: the state before this event."""
    every, state = turn.config.watch_every, turn.state
    ticked = state.tick != before.tick and can_keep_cycle(state)
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
    fit = Fleet(turn.config, turn.state).alike()
    able = sorted(name for name, island in fit.items() if island.watches)
    if not able:
        turn.set(unwatched=())
        return
    last = turn.state.watcher
    name = ([name for name in able if name > last] or able)[0]
    turn.put(replace(turn.state.islands[name], watched_cycle=cycle))
    everything = tuple(range(turn.config.fragments))
    turn.set(watcher=name, watched_cycle=cycle, unwatched=everything)
