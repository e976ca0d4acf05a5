"""Predict the result of a run by a calibration, with the production protocol."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np

from diloco_jax.config import Config, ConfigError, RunConfig
from diloco_jax.coordinator import summary
from diloco_jax.coordinator.settings import faults_of, policy_config
from diloco_jax.core.codecs.codec import get_codec
from diloco_jax.core.payload import PayloadLayout
from diloco_jax.faults import COORDINATOR
from diloco_jax.models.build import build
from diloco_jax.models.plan import build_plan
from diloco_jax.simulation.calibration.fit import LEAST_S, Calibration
from diloco_jax.simulation.emulation.attendance import Attendance
from diloco_jax.simulation.emulation.diary import Diary
from diloco_jax.simulation.emulation.options import EmulationOptions
from diloco_jax.simulation.fleets.checks import in_reach
from diloco_jax.simulation.progress import Progress, nobody
from diloco_jax.simulation.virtual.body import NoBody
from diloco_jax.simulation.virtual.clock import Clock
from diloco_jax.simulation.virtual.line import LineSpeed
from diloco_jax.simulation.virtual.merging import NoArrays
from diloco_jax.simulation.virtual.world import World

EVENTS_PER_PROGRESS = 1000


def predict_summary(
    calibration: Calibration, config: Config, seed: int, progress: Progress = nobody
) -> dict[str, Any]:
    """Play a run of `config` to its end; return its `summary.json`, without losses.

    seed: seed of the step times. progress: called with the share of the tokens that the
    run has. Raises ConfigError if the calibration does not tell enough.
    """
    steps = config.run.total_tokens / min(
        island.batch_size * config.run.sequence_length
        for island in config.islands.values()
    )
    in_reach("steps", steps, f"lower total_tokens = {config.run.total_tokens}")
    world = _World(calibration, config)
    attendance = _Attendance(calibration, config, world, seed)
    calls, total = itertools.count(1), config.run.total_tokens

    def over() -> bool:
        if next(calls) % EVENTS_PER_PROGRESS == 0:
            progress(min(world.coordinator.state.progress_tokens / total, 1.0))
        return world.coordinator.finished

    world.clock.run(done=over)
    progress(1.0)
    coordinator, now = world.coordinator, world.clock.now
    if not coordinator.finished:
        raise ConfigError(
            f"the predicted run stands still at {now:.0f} s with "
            f"{coordinator.state.progress_tokens} of its {total} tokens; lower "
            f"sync.quorum, raise placement.restarts = {config.placement.restarts}, or "
            f"take faults out"
        )
    attendance.close()
    return summary.summary(
        coordinator.config,
        coordinator.state,
        attendance.roster(),
        wall_seconds=now,
        alerts=[],
        now=now,
    )


class _World(World):
    """Islands with lines of their own, and a coordinator that dies.

    It dies at the merges of the config's faults, and comes back from its log.
    """

    def __init__(self, calibration: Calibration, config: Config) -> None:
        run, placement = config.run, config.placement
        faults = faults_of(config, COORDINATOR)
        kills = [fault for fault in faults.faults if fault.kills]
        if len(kills) < len(faults.faults) or len(kills) > placement.restarts:
            raise ConfigError(
                f"placement.faults = {', '.join(placement.faults)}: a paused "
                f"coordinator is not predicted, nor one that is killed more than "
                f"placement.restarts = {placement.restarts} times; take faults out"
            )
        down_s = calibration.outage_s.value + placement.restart_delay_s
        down, full = (_payload_bytes(run, c) for c in (run.sync.codec_down, "f32"))
        super().__init__(
            run,
            policy_config(
                run, placement, "predicted", build_plan(run, build(run)).sizes
            ),
            NoArrays(bytes_down=down, bytes_full=full),
            report_s=placement.deadlines.report_s,
            make_body=lambda name: _Counted(self.clock, self.diaries[name][-1]),
            outages={fault.step: down_s for fault in kills},
        )
        self.diaries: dict[str, list[Diary]] = {}
        """Diaries of the attendance."""
        self._calibration = calibration
        self._recorded_up = _payload_bytes(
            calibration.config.run, calibration.config.run.sync.codec_up
        )

    def line_speed(self, name: str) -> LineSpeed:
        """See World."""
        transfer_s = max(self._calibration.of("transfer_s", name), LEAST_S)
        rate = statistics.fmean(self._recorded_up) / transfer_s
        return LineSpeed(latency_s=LEAST_S, up_bytes_per_s=rate, down_bytes_per_s=rate)


class _Attendance(Attendance):
    """Islands that start, step and come back as the calibration says."""

    def __init__(
        self, calibration: Calibration, config: Config, world: _World, seed: int
    ) -> None:
        self._calibration = calibration
        self._steps = {
            name: calibration.steps_of(name, config.run, island)
            for name, island in config.islands.items()
        }
        # An absence ends with a join, in which anchors are fetched.
        self._rejoin_s = min(calibration.of("join_s", ""), calibration.away_s.value)
        self._delay_s = config.placement.restart_delay_s
        starts = {
            name: (calibration.of("start_s", name), math.inf) for name in config.islands
        }
        options = EmulationOptions(joins=starts, chance_seed=seed)
        up = _payload_bytes(config.run, config.run.sync.codec_up)
        super().__init__(config, options, world, up)
        world.diaries = self.diaries

    def usual_steps(self, name: str, chance: np.random.Generator) -> Iterator[float]:
        return self._steps[name].draw(chance)

    def join_seconds(self, name: str, incarnation: int) -> float:
        join_s = self._calibration.of("join_s", name)
        return join_s if incarnation == 1 else self._rejoin_s

    def compile_seconds(self, name: str, incarnation: int) -> float:
        compile_s = self._calibration.of("compile_s", name)
        return min(compile_s, self.join_seconds(name, incarnation))

    @property
    def down_seconds(self) -> float:
        return self._calibration.away_s.value - self._rejoin_s + self._delay_s


class _Counted(NoBody):
    """Body without arrays, which writes steps into the diary."""

    def __init__(self, clock: Clock, diary: Diary) -> None:
        self._clock, self._diary = clock, diary

    def train(self, positions: np.ndarray, learning_rate: float) -> None:
        self._diary.step_began.append(self._clock.now)
        self._diary.learning_rates.append(learning_rate)
        self._diary.losses.append(math.nan)


@functools.lru_cache
def _payload_bytes(run: RunConfig, codec: Any) -> tuple[int, ...]:
    """Return the payload bytes of one fragment after the other."""
    pieces = build_plan(run, build(run)).fragments
    return tuple(PayloadLayout.of(get_codec(codec), p).total_bytes for p in pieces)
