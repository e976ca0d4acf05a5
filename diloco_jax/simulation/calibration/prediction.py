"""What a run would come to, by a calibration: production policy in virtual time.

No arrays, and no chance but in which of the recorded step times come when.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.config import Config, ConfigError, RunConfig
from diloco_jax.coordinator import summary
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.core.codec import get_codec
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.core.payload import PayloadLayout
from diloco_jax.deadlines import Deadlines
from diloco_jax.faults import COORDINATOR, parse_faults
from diloco_jax.island.arrivals import Arrival
from diloco_jax.models.build import build
from diloco_jax.models.plan import build_plan
from diloco_jax.simulation.calibration.fit import Calibration, Fitted, Steps
from diloco_jax.simulation.emulation.attendance import Attendance
from diloco_jax.simulation.emulation.history import Diary
from diloco_jax.simulation.emulation.options import EmulationOptions
from diloco_jax.simulation.fleets.checks import in_reach
from diloco_jax.simulation.progress import Progress, nobody
from diloco_jax.simulation.virtual.body import NoBody
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.line import LineSpeed
from diloco_jax.simulation.virtual.merging import Fetched, NoArrays
from diloco_jax.simulation.virtual.mortal import MortalWorld

RUN_ID = "predicted"
LEAST_TRANSFER_S = 1e-6
SHORTEST_STEP_S = 1e-6
EVENTS_PER_PROGRESS = 1000


class Prediction:
    """Runs `config` as the calibrated fleet would: make it, `summary` it.

    seed: of the order in which recorded step times come.
    """

    def __init__(self, calibration: Calibration, config: Config, seed: int) -> None:
        """Raises ConfigError if the calibration does not tell what is needed."""
        run, placement = config.run, config.placement
        self._calibration, self._restarts = calibration, placement.restarts
        self._total_tokens = run.total_tokens
        payloads, recorded = _payloads(run), _payloads(calibration.run)
        faults = parse_faults(placement.faults, config.islands)
        coordinator_faults = faults.for_who(COORDINATOR).faults
        if any(fault.pause_s is not None for fault in coordinator_faults):
            raise ConfigError(
                f"placement.faults = {', '.join(placement.faults)}: a coordinator that "
                f"is paused is not predicted; leave it out, or kill it"
            )
        delay_s = placement.restart_delay_s
        self._world = world = MortalWorld(
            run,
            policy_config(run, placement, RUN_ID, _plan(run).sizes),
            NoArrays(bytes_down=payloads.down, bytes_full=payloads.full),
            report_s=Deadlines(placement.time_budget_s).report_s,
            line_speeds={
                name: _line_speed(calibration, name, recorded)
                for name in config.islands
            },
            make_body=lambda name: _Counted(
                world.clock, self._attendance.diaries[name][-1], payloads.up
            ),
            merge_seconds=calibration.merge_s.value,
            compiled_s=calibration.compiled_s.value,
            recompiled_s=calibration.recompiled_s.value,
            dies_at=[fault.step for fault in coordinator_faults],
            down_s=calibration.outage_s.value + delay_s,
            resume_s=calibration.resume_s.value,
        )
        self._attendance = _Attendance(calibration, config, world, payloads.up, seed)

    def summary(self, progress: Progress = nobody) -> dict[str, Any]:
        """Plays it to its end; as `summary.json`, without losses. progress: called with
        the share of the tokens that the run has."""
        self._play(progress)
        if self._world.crashes > self._restarts:
            raise ConfigError(
                f"placement.restarts = {self._restarts}, but placement.faults kill the "
                f"coordinator {self._world.crashes} times in a row before the run is "
                f"over, and diloco run would not start it again; raise it, or take "
                f"faults out"
            )
        coordinator, now = self._world.coordinator, self._world.clock.now
        if not coordinator.finished:
            raise ConfigError(
                f"the predicted run stands still at {now:.0f} s with "
                f"{coordinator.state.progress_tokens} of its tokens; lower "
                f"sync.quorum, raise placement.restarts = {self._restarts}, or take "
                f"faults out"
            )
        self._attendance.close()
        return summary.summary(
            coordinator.config,
            coordinator.state,
            self._attendance.roster(),
            wall_seconds=now + self._calibration.closing_s,
            alerts=[],
            now=now + self._calibration.leaving_s,
        )

    def _play(self, progress: Progress) -> None:
        world, calls = self._world, itertools.count(1)

        def over() -> bool:
            if next(calls) % EVENTS_PER_PROGRESS == 0:
                done = world.coordinator.state.progress_tokens / self._total_tokens
                progress(min(done, 1.0))
            return world.coordinator.finished

        world.clock.run(done=over)
        progress(1.0)


def require_in_reach(calibration: Calibration, config: Config, seeds: int) -> None:
    """Raises ConfigError if `seeds` predictions have more events than are got through,
    or if the calibration does not tell what a step takes."""
    per_second = tokens_per_second = 0.0
    for name, island in config.islands.items():
        step_s = calibration.step_seconds(name, config.run, island).fitted.value
        rate = 1 / max(step_s, SHORTEST_STEP_S)
        per_second += rate
        tokens_per_second += rate * island.batch_size * config.run.sequence_length
    sync = config.run.sync
    takes = sync.fragments / sync.steps_per_cycle
    steps = seeds * config.run.total_tokens / tokens_per_second * per_second
    in_reach(
        "steps and takes of islands",
        steps * (1 + takes),
        f"lower total_tokens = {config.run.total_tokens}, or --seeds {seeds}",
    )


class _Attendance(Attendance):
    """Islands that start, step and come back as the calibration says."""

    def __init__(
        self,
        calibration: Calibration,
        config: Config,
        world: MortalWorld,
        bytes_up: tuple[int, ...],
        seed: int,
    ) -> None:
        self._calibration = calibration
        self._steps: Mapping[str, Steps] = {
            name: calibration.step_seconds(name, config.run, island)
            for name, island in config.islands.items()
        }
        self._restart_delay_s = config.placement.restart_delay_s
        starts = {
            name: (_of(calibration.start_s, name), math.inf) for name in config.islands
        }
        options = EmulationOptions(joins=starts, chance_seed=seed)
        super().__init__(config, options, world, bytes_up)

    def usual_steps(self, name: str, chance: np.random.Generator) -> Iterator[float]:
        """See Attendance."""
        while True:
            yield from chance.permutation(self._steps[name].seconds).tolist()

    def join_seconds(self, name: str, incarnation: int) -> float:
        """See Attendance."""
        calibration = self._calibration
        first = incarnation == 1
        return _of(calibration.join_s if first else calibration.rejoin_s, name)

    def compile_seconds(self, name: str, incarnation: int) -> float:
        """See Attendance."""
        join_s = self.join_seconds(name, incarnation)
        return min(_of(self._calibration.compile_s, name), join_s)

    @property
    def down_seconds(self) -> float:
        """See Attendance."""
        return self._calibration.restart_s.value + self._restart_delay_s


class _Counted(NoBody):
    """No arrays; steps and bytes go into the diary."""

    def __init__(self, clock: Clock, diary: Diary, bytes_up: Sequence[int]) -> None:
        self._clock, self._diary, self._bytes_up = clock, diary, bytes_up

    def begin(self, fetched: Mapping[int, Fetched]) -> None:
        """See Body."""
        self._diary.bytes_join += sum(part.nbytes for part in fetched.values())

    def arrival(self, fragment: int, fetched: Fetched) -> Arrival:
        """See Body."""
        self._diary.bytes_down += fetched.nbytes
        return super().arrival(fragment, fetched)

    def train(self, positions: np.ndarray, learning_rate: float) -> None:
        """See Body."""
        self._diary.step_began.append(self._clock.now)
        self._diary.learning_rates.append(learning_rate)
        self._diary.losses.append(math.nan)

    def take(self, fragment: int) -> None:
        """See Arrays."""
        self._diary.bytes_up += self._bytes_up[fragment]


class _Payloads(NamedTuple):
    """Bytes by fragment: of deltas, publishes, and anchors in full."""

    up: tuple[int, ...]
    down: tuple[int, ...]
    full: tuple[int, ...]


def _payloads(run: RunConfig) -> _Payloads:
    fragments = _plan(run).fragments
    codecs = map(get_codec, (run.sync.codec_up, run.sync.codec_down, "f32"))
    return _Payloads(
        *(
            tuple(PayloadLayout.of(codec, pieces).total_bytes for pieces in fragments)
            for codec in codecs
        )
    )


def _plan(run: RunConfig) -> FragmentPlan:
    return build_plan(run, build(run))


def _line_speed(calibration: Calibration, name: str, recorded: _Payloads) -> LineSpeed:
    """Transfers take what they took, at as many bytes."""
    return LineSpeed(
        latency_s=_of(calibration.latency_s, name),
        up_bytes_per_s=_rate(recorded.up, _of(calibration.up_s, name)),
        down_bytes_per_s=_rate(recorded.down, _of(calibration.down_s, name)),
    )


def _rate(nbytes: Sequence[int], seconds: float) -> float:
    return statistics.fmean(nbytes) / max(seconds, LEAST_TRANSFER_S)


def _of(fitted: Mapping[str, Fitted], name: str) -> float:
    return fitted.get(name, fitted[""]).value
