"""Islands that fail, differ and come back, under the production protocol.

An island's batch is fixed for its incarnation, as in the runtime. So a stop of some
seconds is one long step. With w of n slices left a step takes n / w as long, on the
same number of tokens. Only an island without any slice left dies, and comes back as its
next incarnation. A lost slice loses no state, since the others hold the same
parameters.

Compilation and fetches of the first islands are not counted; those of a later join are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from diloco_jax.config import ConfigError, Placement, RunConfig, SyncConfig
from diloco_jax.config.family_fields import check_member
from diloco_jax.config.fields import (
    AT_LEAST_1,
    LONGEST_S,
    NOT_NEGATIVE,
    SECONDS,
    Bound,
    check_bounds,
    setting,
)
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.core.codecs import Codec
from diloco_jax.core.families import CODECS
from diloco_jax.observability.measures import IslandMeasure, participation
from diloco_jax.protocol.coordinator import ledger
from diloco_jax.simulation.fleets.failures import Capacity, Segment
from diloco_jax.simulation.output import Progress, nobody
from diloco_jax.simulation.virtual.arrays import NoArrays
from diloco_jax.simulation.virtual.clock import LineSpeed
from diloco_jax.simulation.virtual.island import IslandSpec
from diloco_jax.simulation.virtual.world import World

TOKENS_PER_STEP = 1000
"""Tokens per step of every island: only shares are asked for."""
ENDLESS_TOKENS = 1 << 60
TIME_BUDGET_STEPS = 100
"""Lease of an island, in steps, because no sign of life between steps is simulated. The
coordinator sees at once that a dead island's connection broke.
"""
PROGRESS_CALLS = 200
PARAMS = Bound(0, 1e15, above=True)
FRAGMENTS = Bound(1, 100_000)
GBIT_PER_S = Bound(1e-6, 1e6)
STEP_SECONDS = Bound(1e-6, LONGEST_S)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeTerms:
    """Exchange between islands and coordinator: its content, frequency and speed."""

    cycle: int = setting(
        SyncConfig.steps_per_cycle,
        AT_LEAST_1,
        help="H: inner steps between two merges of a fragment.",
    )
    fragments: int = setting(
        SyncConfig.fragments,
        FRAGMENTS,
        help="P: fragments that the model is cut into.",
    )
    overlap: int = setting(
        SyncConfig.overlap_steps,
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


class Machine(NamedTuple):
    """An island of a fleet."""

    step_seconds: float
    """Seconds of an undisturbed step."""
    steps: Iterator[float]
    """Seconds of each step on all chips."""
    life: Iterator[Segment]
    """Life of the island's chips, on the fleet's clock."""
    lead: int = 0
    """See `IslandSpec`."""


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
    machines: Mapping[str, Machine],
    seconds: float,
    progress: Progress = nobody,
) -> FleetOutcome:
    """Run islands for `seconds`, from the moment at which all are about to step.

    The run is then ended as if it had its tokens: islands end their steps and open
    fragments are merged, in seconds that do not count. Only the tokens of that time
    count, and the step that was under way.

    sync: of the run; cycle, fragments and overlap as in `exchange`.
    step_seconds: seconds of a usual step; the time budget follows from it.
    progress: called with the share that is done.
    """
    world, bytes_up = _world(exchange, sync, step_seconds)
    clock, config = world.clock, world.coordinator.config
    capacities = {name: Capacity(machine.life) for name, machine in machines.items()}

    def start(name: str) -> None:
        spec = IslandSpec(
            name=name,
            batch_size=1,
            step_seconds=lambda _: step(name),
            join_seconds=exchange.join_seconds,
            bytes_up=bytes_up,
            lead=machines[name].lead,
        )
        world.start(spec)

    def step(name: str) -> float:
        work_seconds = next(machines[name].steps)
        until, done = capacities[name].use(clock.now, work_seconds)
        takes = until - clock.now
        if not done:
            # The loss comes before the end of the step, which is due at the same time.
            clock.after(takes, lambda: lose(name))
        return takes

    def lose(name: str) -> None:
        world.kill(name)
        clock.at(capacities[name].back_at(clock.now), lambda: start(name))

    for name in machines:
        start(name)
    clock.run(done=lambda: all(i.boundary for i in world.islands.values()))
    began = clock.now
    for call in range(1, PROGRESS_CALLS + 1):
        world.run(began + seconds * call / PROGRESS_CALLS)
        progress(call / PROGRESS_CALLS)
    now, coordinator = clock.now, world.coordinator
    fragments, tokens = coordinator.state.fragments, coordinator.state.progress_tokens
    coordinator.config = replace(config, total_tokens=max(1, tokens))
    world.run()
    state = coordinator.state
    islands = {}
    for name, machine in machines.items():
        totals, active = (
            ledger.island_totals(config, state, name),
            capacities[name].active,
        )
        until = max(now, active[-1][1]) if active else now
        islands[name] = IslandMeasure(
            provisioned_seconds=until - began,
            tokens_per_step=TOKENS_PER_STEP,
            median_step_seconds=machine.step_seconds,
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
