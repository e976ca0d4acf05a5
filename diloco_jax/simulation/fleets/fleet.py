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
import math
from collections.abc import Iterator
from typing import Any

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
from diloco_jax.protocol.coordinator.state import Fragment
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
MOST_EVENTS = 1e8
"""Events that a simulation may have: hours on one core."""
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


def require_reach(what: str, count: float, remedy: str) -> None:
    """Raise ConfigError if `count` is more than a simulation gets through."""
    if not count <= MOST_EVENTS:
        raise ConfigError(
            f"that is {count:.2g} {what} to simulate, more than {MOST_EVENTS:.0e}; "
            f"{remedy}"
        )


def require_reach_of_islands(islands: float, fields: str) -> None:
    """Raise ConfigError if the protocol cannot get through the deltas of these islands.

    At every delta the protocol goes through its books of all islands. fields: names of
    the fields that set the number of islands.
    """
    pairs = islands * islands
    require_reach(f"pairs of {islands:,.15g} islands", pairs, f"lower {fields}")


def require_reach_of_steps(
    hours: float,
    step_seconds: float,
    islands: int,
    exchange: ExchangeTerms | None = None,
) -> None:
    """Raise ConfigError if there are too many steps or deltas in these hours.

    exchange: None: there are no deltas. At every delta the protocol goes through its
    books of all fragments.
    """
    steps = hours * 3600 / step_seconds * islands
    require_reach("steps of islands", steps, "lower hours, or raise step_seconds")
    if exchange is not None:
        exchange.validate()
        deltas = steps / exchange.cycle * exchange.fragments
        require_reach(
            f"pairs of {deltas:.2g} deltas and fragments = {exchange.fragments}",
            deltas * exchange.fragments,
            "lower fragments or hours, or raise cycle or step_seconds",
        )


@dataclasses.dataclass
class _Member:
    spec: IslandSpec
    step_seconds: float
    capacity: Capacity
    since: float
    until: float = math.inf


class VirtualFleet:
    """Islands and their coordinator.

    sync: of the run; cycle, fragments and overlap as in `exchange`.
    step_seconds: seconds of a usual step; the time budget follows from it.
    total_tokens: tokens at which the run ends by itself.
    """

    def __init__(
        self,
        exchange: ExchangeTerms,
        sync: SyncConfig,
        step_seconds: float,
        total_tokens: int = ENDLESS_TOKENS,
    ) -> None:
        run = RunConfig(
            sync=sync,
            sequence_length=TOKENS_PER_STEP,
            total_tokens=total_tokens,
        )
        budget_s = TIME_BUDGET_STEPS * step_seconds
        placement = Placement(time_budget_s=budget_s, outage_budget_s=budget_s)
        sizes = exchange.fragment_sizes()
        self._config = policy_config(run, placement, "simulation", sizes)
        self._bytes_up, bytes_down, full = (
            tuple(Codec(codec).tile_bytes(size) for size in sizes)
            for codec in (sync.codec_up, sync.codec_down, "f32")
        )
        bytes_per_s = exchange.link_gbit_per_s * 1e9 / 8
        self._world = World(
            run,
            self._config,
            NoArrays(bytes_down=bytes_down, bytes_full=full),
            report_s=budget_s / 2,
            line_speed=LineSpeed(
                latency_s=exchange.latency_seconds,
                up_bytes_per_s=bytes_per_s,
                down_bytes_per_s=bytes_per_s,
            ),
            merge_seconds=lambda merge: exchange.merge_seconds,
        )
        self._clock = self._world.clock
        self._join_seconds = exchange.join_seconds
        self._members: dict[str, _Member] = {}
        self._began = 0.0
        self._end: tuple[float, tuple[Fragment, ...]] | None = None
        """Time of `end`, and the fragments then."""

    # ---- what happens -----------------------------------------------------------

    def join(
        self,
        name: str,
        step_seconds: float,
        steps: Iterator[float],
        life: Iterator[Segment],
        lead: int = 0,
    ) -> None:
        """Let an island say hello.

        step_seconds: seconds of an undisturbed step. steps: seconds of each step on all
        chips. life: life of the island's chips, on this fleet's clock. lead: see
        `IslandSpec`.
        """
        spec = IslandSpec(
            name=name,
            batch_size=1,
            step_seconds=lambda _: self._step(member, next(steps)),
            join_seconds=self._join_seconds,
            bytes_up=self._bytes_up,
            lead=lead,
        )
        member = _Member(spec, step_seconds, Capacity(life), self._clock.now)
        self._members[name] = member
        self._world.start(spec)

    def leave(self, name: str) -> None:
        """Let an island say goodbye; its work that has not arrived is lost."""
        self._members[name].until = self._clock.now
        self._world.islands[name].leave("preempted")

    def begin(self) -> None:
        """Run until all islands are about to step; time counts from here on."""
        islands = self._world.islands.values()
        self._clock.run(done=lambda: all(i.boundary for i in islands))
        self._began = self._clock.now
        for member in self._members.values():
            member.since = self._began

    def run(self, seconds: float, progress: Progress = nobody) -> None:
        """Run for `seconds`. progress: called with the share that is done."""
        began = self._clock.now
        for call in range(1, PROGRESS_CALLS + 1):
            self._world.run(began + seconds * call / PROGRESS_CALLS)
            progress(call / PROGRESS_CALLS)

    def run_to(self, tokens: float) -> None:
        """Run until the coordinator has `tokens` tokens, or the run is over."""
        coordinator = self._world.coordinator
        self._clock.run(
            done=lambda: (
                coordinator.finished or coordinator.state.progress_tokens >= tokens
            )
        )

    def end(self) -> None:
        """End the run as if it had its tokens.

        Islands end their steps and open fragments are merged, in seconds that do not
        count. Only the tokens of that time count.
        """
        coordinator = self._world.coordinator
        tokens = max(1, coordinator.state.progress_tokens)
        coordinator.config = replace(coordinator.config, total_tokens=tokens)
        self._end = self._clock.now, coordinator.state.fragments
        self._world.run()

    def _step(self, member: _Member, work_seconds: float) -> float:
        until, done = member.capacity.use(self._clock.now, work_seconds)
        seconds = until - self._clock.now
        if not done:
            # The loss comes before the end of the step, which is due at the same time.
            self._clock.after(seconds, lambda: self._lost(member))
        return seconds

    def _lost(self, member: _Member) -> None:
        self._world.kill(member.spec.name)
        back_at = member.capacity.back_at(self._clock.now)
        self._clock.at(back_at, lambda: self._world.start(member.spec))

    # ---- what came of it --------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Seconds from `begin` to now, or to `end`."""
        return self._counted[0] - self._began

    @property
    def totals(self) -> ledger.Totals:
        """Token totals of all islands."""
        return ledger.run_totals(self._config, self._world.coordinator.state)

    @property
    def merges(self) -> int:
        """Merges of all fragments, up to `end`."""
        return sum(fragment.merges for fragment in self._counted[1])

    def participation(self) -> float:
        """Return the participation of all islands in all fragments, up to `end`."""
        accounts = [a for f in self._counted[1] for a in f.accounts.values()]
        return participation(
            sum(a.merges_in for a in accounts), sum(a.merges_alive for a in accounts)
        )

    def measures(self) -> list[IslandMeasure]:
        """Return the measures of every island."""
        now, state = self._counted[0], self._world.coordinator.state
        found = []
        for name, member in self._members.items():
            totals = ledger.island_totals(self._config, state, name)
            active, until = member.capacity.active, min(member.until, now)
            if self._end is not None and active:
                # The step that was under way counts.
                until = min(member.until, max(until, active[-1][1]))
            found.append(
                IslandMeasure(
                    provisioned_seconds=until - member.since,
                    tokens_per_step=TOKENS_PER_STEP,
                    median_step_seconds=member.step_seconds,
                    computed_tokens=totals.computed,
                    merged_tokens=totals.merged,
                    active=tuple(
                        (start, min(stop, now)) for start, stop in active if start < now
                    ),
                )
            )
        return found

    @property
    def _counted(self) -> tuple[float, tuple[Fragment, ...]]:
        """Time up to which all but tokens counts, and the fragments then."""
        return self._end or (self._clock.now, self._world.coordinator.state.fragments)
