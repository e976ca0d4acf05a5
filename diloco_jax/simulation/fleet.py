"""Fleets: islands of many chips that fail, under the production protocol.

An island is made of equal slices. Interruptions are Poisson, at the rate of its working
chips over the mean time between interruptions (MTBI) of one chip; stopped chips are not
interrupted. An interruption stops the island for `down_seconds`; it goes on with one
slice less. The slice is back `return_seconds` after the interruption. The next stop
that ends after this moment takes it in, or else a stop of `up_seconds` for that alone.
There is one event per stop, so a day of a million chips is some thousand events.

An island's batch is fixed for its incarnation, as in the runtime. So a stop is one long
step, and the work that a real island repeats is part of it. With w of n slices left a
step takes n / w as long, on the same number of tokens. Only an island without any slice
left dies, and comes back as its next incarnation. A lost slice loses no state, since
the others hold the same parameters. Compilation and fetches of the first islands are
not counted; those of a later join are.

The baseline is one data-parallel program on all chips (`elastic`, `rigid`). No protocol
decides anything there, so both are closed loops over interruptions.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from diloco_jax.config import ConfigError, Placement, RunConfig, SyncConfig
from diloco_jax.config.config import check_member
from diloco_jax.config.fields import (
    AT_LEAST_1,
    LONGEST_S,
    NOT_NEGATIVE,
    SECONDS,
    Bound,
    check_bounds,
    setting,
)
from diloco_jax.config.resolving import LONG
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.core.codecs import Codec
from diloco_jax.core.families import CODECS
from diloco_jax.observability.measures import IslandMeasure, participation
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.simulation.clock import LineSpeed
from diloco_jax.simulation.coordinator import NoArrays, World
from diloco_jax.simulation.island import IslandSpec

Progress = Callable[[float], None]
TOKENS_PER_STEP = 1000
"""Tokens per step of every island: only shares are asked for."""
ENDLESS_TOKENS = 1 << 60
TIME_BUDGET_STEPS = 100
"""Lease of an island, in steps, because no sign of life between steps is simulated. The
coordinator sees at once that a dead island's connection broke.
"""
PROGRESS_CALLS = 200
MOST_LOSSES = 100
"""Losses of an island, on average, for which the end of a run is waited for."""
PARAMS = Bound(0, 1e15, above=True)
FRAGMENTS = Bound(1, 100_000)
GBIT_PER_S = Bound(1e-6, 1e6)
STEP_SECONDS = Bound(1e-6, LONGEST_S)
SECONDS_PER_YEAR = 365.25 * 24 * 3600
TOUCHING_S = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureModel:
    """Rates and times of failures.

    The defaults are calibrated: they give the published goodput, as
    docs/results/goodput.md shows.
    """

    mtbi_years: float = setting(
        1.0,
        NOT_NEGATIVE,
        help="Mean years between interruptions of one chip; 0 = they never come.",
    )
    slice_chips: int = setting(
        4096,
        AT_LEAST_1,
        help="Chips that go away together. An island has the nearest whole number of "
        "slices.",
    )
    down_seconds: float = setting(
        12.0,
        SECONDS,
        help="Seconds for which an island stops when it loses a slice.",
    )
    up_seconds: float = setting(
        12.0,
        SECONDS,
        help="Seconds for which an island stops to take slices in again.",
    )
    return_seconds: float = setting(
        120.0,
        SECONDS,
        help="Seconds from an interruption until its slice can be taken in again.",
    )
    restart_seconds: float = setting(
        85.0,
        SECONDS,
        help="Seconds for which everything stops without elasticity.",
    )

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)

    @property
    def interruptions_per_chip_second(self) -> float:
        """Interruptions per second of one working chip."""
        if not self.mtbi_years:
            return 0.0
        return 1 / (self.mtbi_years * SECONDS_PER_YEAR)

    def slices(self, chips: float) -> int:
        """Return the number of slices of an island with `chips` chips."""
        return max(1, round(chips / self.slice_chips))


class Segment(NamedTuple):
    """Interval in which `share` of an island's chips work. lost: no chip is left."""

    start: float
    stop: float
    share: float
    lost: bool = False


def segments(
    chips: float, model: FailureModel, rng: np.random.Generator
) -> Iterator[Segment]:
    """Yield the life of an island from second 0 on, without gaps and without end.

    If nothing interrupts the island any more, its last segment ends at infinity.
    """
    slices = model.slices(chips)
    rate = model.interruptions_per_chip_second * chips / slices
    working, now = slices, 0.0
    returns: collections.deque[float] = collections.deque()
    while True:
        fails = back = math.inf
        if working and rate:
            # The process is memoryless, so a return in between may draw the failure
            # anew.
            fails = now + rng.exponential(1 / (rate * working))
        if returns:
            back = returns[0]
        if (event := min(fails, back)) > now:
            yield Segment(now, event, working / slices, lost=not working)
        if event == math.inf:
            return
        if fails < back:
            working -= 1
            returns.append(fails + model.return_seconds)
            now = event + model.down_seconds
        else:
            # A slice may be back at the moment when a stop ends.
            now = max(event, now) + model.up_seconds
        if now > event:
            yield Segment(event, now, 0.0, lost=not working)
        while returns and returns[0] <= now:
            returns.popleft()
            working += 1


class Capacity:
    """Chip time of an island, used up step by step, forward in time."""

    def __init__(self, life: Iterator[Segment]) -> None:
        self._life = life
        self._segment = next(life)
        self.active: list[tuple[float, float]] = []
        """Intervals in which steps ran, in order, joined where they touch."""

    def use(self, start: float, work_seconds: float) -> tuple[float, bool]:
        """Make a step that takes `work_seconds` on all chips, from `start` on.

        Returns the time of its end and True, or the time at which the island is lost
        and False.
        """
        now = start
        while not (segment := self._at(now)).lost:
            if segment.share:
                done = now + work_seconds / segment.share
                self._note(now, min(done, segment.stop))
                if done <= segment.stop:
                    return done, True
                work_seconds -= (segment.stop - now) * segment.share
            now = segment.stop
        return now, False

    def back_at(self, time: float) -> float:
        """Return the first moment from `time` on at which chips work."""
        while not (segment := self._at(time)).share:
            time = segment.stop
        return time

    def _at(self, time: float) -> Segment:
        while time >= self._segment.stop:
            self._segment = next(self._life)
        return self._segment

    def _note(self, start: float, stop: float) -> None:
        # A clock's sums of seconds are not exact.
        if self.active and start - self.active[-1][1] < TOUCHING_S:
            start = self.active.pop()[0]
        self.active.append((start, stop))


def elastic(
    chips: float,
    step_seconds: float,
    model: FailureModel,
    seconds: float,
    rng: np.random.Generator,
) -> IslandMeasure:
    """Measure one island of all chips that goes on with the slices that are left."""
    worked, active = 0.0, []
    for segment in segments(chips, model, rng):
        if segment.start >= seconds:
            break
        if segment.share:
            stop = min(segment.stop, seconds)
            worked += (stop - segment.start) * segment.share
            active.append((segment.start, stop))
    return _measure(round(worked / step_seconds), step_seconds, seconds, active)


def rigid(
    chips: float,
    step_seconds: float,
    model: FailureModel,
    seconds: float,
    rng: np.random.Generator,
) -> IslandMeasure:
    """Measure an island that stops as a whole after a step with interruptions.

    It stops once for `restart_seconds`, however many interruptions the step had. The
    interrupted step counts as made.
    """
    rate = chips * model.interruptions_per_chip_second
    interrupted = -math.expm1(-rate * step_seconds)
    now, steps = 0.0, 0
    active: list[tuple[float, float]] = []
    while now < seconds:
        run = int(rng.geometric(interrupted)) if interrupted else math.inf
        active.append((now, min(now + run * step_seconds, seconds)))
        # The step in which the time runs out is never finished.
        steps += int(min(run, (seconds - now) // step_seconds))
        now += run * step_seconds + model.restart_seconds
    return _measure(steps, step_seconds, seconds, active)


def _measure(
    steps: int, step_seconds: float, seconds: float, active: list[tuple[float, float]]
) -> IslandMeasure:
    """Measure with one token per step: only shares matter, and every step is merged."""
    return IslandMeasure(
        provisioned_seconds=seconds,
        tokens_per_step=1,
        median_step_seconds=step_seconds,
        computed_tokens=steps,
        merged_tokens=steps,
        active=tuple(active),
    )


# ---- islands under the protocol ----------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeTerms:
    """Exchange between islands and coordinator: its content, frequency and speed."""

    cycle: int = setting(
        LONG.cycle,
        AT_LEAST_1,
        help="H: inner steps between two merges of a fragment.",
    )
    fragments: int = setting(
        SyncConfig.fragments,
        FRAGMENTS,
        help="P: fragments that the model is cut into.",
    )
    overlap: int = setting(
        LONG.overlap,
        NOT_NEGATIVE,
        help="tau: steps an island may do between its take and the adoption.",
    )
    codec: str = setting(SyncConfig.codec_up, help="Encoding of deltas and publishes.")
    params: float = setting(12e9, PARAMS, help="Parameters of the model.")
    link_gbit_per_s: float = setting(
        5.0, GBIT_PER_S, help="Gbit/s of an island's link, each way."
    )
    latency_seconds: float = setting(
        0.05, SECONDS, help="Seconds that a message is under way."
    )
    merge_seconds: float = setting(
        0.5, SECONDS, help="Seconds from the last delta of a merge to its publish."
    )
    join_seconds: float = setting(
        60.0,
        SECONDS,
        help="Seconds that a new incarnation takes for compiling; its fetch of the "
        "parameters comes on top.",
    )

    def sync(self, quorum: int, grace: float) -> SyncConfig:
        """Return the part of these terms that a run's config holds."""
        return SyncConfig(
            steps_per_cycle=self.cycle,
            fragments=self.fragments,
            overlap_steps=self.overlap,
            quorum=quorum,
            grace=grace,
            codec_up=self.codec,
            codec_down=self.codec,
        )

    def fragment_sizes(self) -> tuple[int, ...]:
        """Return the parameters of each fragment, balanced."""
        each, rest = divmod(int(self.params), self.fragments)
        return tuple(each + (f < rest) for f in range(self.fragments))

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)
        check_member("codec", CODECS, self.codec)
        require_cut(self)


def require_cut(config: Any) -> None:
    """Raise ConfigError if `params` cannot be cut into `fragments`."""
    if config.fragments > config.params:
        raise ConfigError(
            f"fragments = {config.fragments}, but params = {config.params:g}; lower "
            f"fragments"
        )


class FleetOutcome(NamedTuple):
    """Result of a fleet."""

    islands: dict[str, IslandMeasure]
    totals: ledger.Totals
    """Token totals of all islands."""
    seconds: float
    merges: int
    """Merges of all fragments."""
    participation: float
    """Participation of all islands in all fragments."""


def run_fleet(
    exchange: ExchangeTerms,
    sync: SyncConfig,
    step_seconds: float,
    lives: Mapping[str, Iterator[Segment]],
    seconds: float,
    progress: Progress = lambda share: None,
) -> FleetOutcome:
    """Run islands for `seconds`, from the moment at which all are about to step.

    The run is then ended as if it had its tokens: islands end their steps and open
    fragments are merged, in seconds that do not count. Only the tokens of that time
    count, and the step that was under way. Islands that are lost before they ever make
    a step never end a run, so `MOST_LOSSES` bounds the wait.

    sync: of the run; cycle, fragments and overlap as in `exchange`.
    step_seconds: seconds of a step on all chips; the time budget follows from it.
    lives: life of each island's chips, on the fleet's clock.
    progress: called with the share that is done.
    """
    world, bytes_up = _world(exchange, sync, step_seconds)
    clock, config = world.clock, world.coordinator.config
    capacities = {name: Capacity(life) for name, life in lives.items()}

    def start(name: str) -> None:
        spec = IslandSpec(
            name=name,
            batch_size=1,
            step_seconds=lambda _: step(name),
            join_seconds=exchange.join_seconds,
            bytes_up=bytes_up,
        )
        world.start(spec)

    def step(name: str) -> float:
        until, done = capacities[name].use(clock.now, step_seconds)
        takes = until - clock.now
        if not done:
            # The loss comes before the end of the step, which is due at the same time.
            clock.after(takes, lambda: lose(name))
        return takes

    losses = 0

    def lose(name: str) -> None:
        nonlocal losses
        losses += 1
        world.kill(name)
        clock.at(capacities[name].back_at(clock.now), lambda: start(name))

    for name in lives:
        start(name)
    clock.run(done=lambda: all(i.boundary for i in world.islands.values()))
    began = clock.now
    for call in range(1, PROGRESS_CALLS + 1):
        world.run(began + seconds * call / PROGRESS_CALLS)
        progress(call / PROGRESS_CALLS)
    now, coordinator = clock.now, world.coordinator
    fragments, tokens = coordinator.state.fragments, coordinator.state.progress_tokens
    coordinator.config = replace(config, total_tokens=max(1, tokens))
    most = losses + MOST_LOSSES * len(lives)
    clock.run(done=lambda: coordinator.finished or losses >= most)
    state = coordinator.state
    islands = {}
    for name, capacity in capacities.items():
        totals, active = ledger.island_totals(config, state, name), capacity.active
        until = max(now, active[-1][1]) if active else now
        islands[name] = IslandMeasure(
            provisioned_seconds=until - began,
            tokens_per_step=TOKENS_PER_STEP,
            median_step_seconds=step_seconds,
            computed_tokens=totals.computed,
            merged_tokens=totals.merged,
            active=tuple(
                (begin, min(stop, now)) for begin, stop in active if begin < now
            ),
        )
    accounts = [a for fragment in fragments for a in fragment.accounts.values()]
    return FleetOutcome(
        islands=islands,
        totals=ledger.run_totals(config, state),
        seconds=now - began,
        merges=sum(fragment.merges for fragment in fragments),
        participation=participation(
            sum(a.merges_in for a in accounts), sum(a.merges_alive for a in accounts)
        ),
    )


def _world(
    exchange: ExchangeTerms, sync: SyncConfig, step_seconds: float
) -> tuple[World, tuple[int, ...]]:
    """Return a world without islands, and the bytes of a delta by fragment."""
    run = RunConfig(
        sync=sync, sequence_length=TOKENS_PER_STEP, total_tokens=ENDLESS_TOKENS
    )
    budget_s = TIME_BUDGET_STEPS * step_seconds
    placement = Placement(time_budget_s=budget_s, outage_budget_s=budget_s)
    sizes = exchange.fragment_sizes()
    bytes_up, bytes_down, full = (
        tuple(Codec(codec).tile_bytes(size) for size in sizes)
        for codec in (sync.codec_up, sync.codec_down, "f32")
    )
    bytes_per_s = exchange.link_gbit_per_s * 1e9 / 8
    world = World(
        run,
        policy_config(run, placement, "simulation", sizes),
        NoArrays(bytes_down=bytes_down, bytes_full=full),
        report_s=budget_s / 2,
        line_speed=LineSpeed(
            latency_s=exchange.latency_seconds,
            up_bytes_per_s=bytes_per_s,
            down_bytes_per_s=bytes_per_s,
        ),
        merge_seconds=lambda merge: exchange.merge_seconds,
    )
    return world, bytes_up
