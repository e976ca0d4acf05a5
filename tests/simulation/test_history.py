"""The history of a recorded run: what its tape and metrics say, as tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from diloco_jax import (
    Config,
    ConfigError,
    EmulationOptions,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
    read_history,
)
from diloco_jax.coordinator import summary
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.observability.history import COLUMNS, outages
from diloco_jax.observability.tape import Tape
from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator.events import Effect, Note, Persist
from diloco_jax.simulation.coordinator import NoArrays, VirtualCoordinator
from diloco_jax.simulation.emulate import Attendance
from diloco_jax.simulation.island import NoBody
from diloco_jax.simulation.world import World

BEGUN, MEDIAN_S = 1e6, 0.5
STEP_S = {"a": 0.5, "b": 0.7, "c": 1.3}
SIZES = (100, 100, 100)


def record(workdir: Path) -> dict[str, Any]:
    """Leave the tape of a run in virtual time, in which an island and the coordinator
    are killed; return its summary."""
    config = Config(
        run=RunConfig(
            sync=SyncConfig(steps_per_cycle=6, fragments=3, quorum=2),
            sequence_length=8,
            total_tokens=20_000,
        ),
        islands={
            name: IslandConfig(batch_size=2, step_seconds=seconds)
            for name, seconds in STEP_S.items()
        },
        placement=Placement(faults=("b@60:kill",)),
    )
    tape = Tape(workdir / "tape.jsonl")
    carry_out = VirtualCoordinator.carry_out

    def write(line: dict[str, Any], now: float) -> None:
        tape.append({**line, "time": BEGUN + now})

    def recorded(coordinator: VirtualCoordinator, effect: Effect) -> None:
        if isinstance(effect, Persist | Note):
            write(records.line(effect.record), coordinator.clock.now)
        carry_out(coordinator, effect)

    class Counted(NoBody):
        def __init__(self, name: str) -> None:
            self.diary = attendance.diaries[name][-1]

        def train(self, positions: np.ndarray, learning_rate: float) -> None:
            row = [world.clock.now, math.nan, learning_rate, math.nan, 0, 0]
            self.diary.rows.append(row)

    world = World(
        config.run,
        policy_config(config.run, config.placement, "r", SIZES),
        NoArrays(bytes_down=SIZES, bytes_full=SIZES),
        report_s=config.placement.deadlines.report_s,
        make_body=Counted,
        outages={50: 6.0},
    )
    options = EmulationOptions(join_seconds=5.0, down_seconds=8.0)
    attendance = Attendance(config, options, world, SIZES)
    write({"kind": "begun"}, 0.0)
    with mock.patch.object(VirtualCoordinator, "carry_out", recorded):
        world.run()
    attendance.close()
    tape.close()
    coordinator, now = world.coordinator, world.clock.now
    return summary.summary(
        coordinator.config,
        coordinator.state,
        attendance.roster(),
        wall_seconds=now,
        alerts=[],
        now=now,
    )


def line(at, step, loss):
    return {
        **{"kind": "island", "island": "a", "time": BEGUN + at, "step": step},
        **{"loss": loss, "learning_rate": 0.1, "median_step_seconds": MEDIAN_S},
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    told = record(workdir)
    lines = [line(20, 0, None), line(21, 1, 5.0), line(22, 3, 4.0), line(32, 4, 3.0)]
    lines.append({"kind": "merge", "time": BEGUN + 30, "fragment": 0, "version": 1})
    lines[-1] |= {"norm": 0.5, "pairwise_cosine": None}
    text = "".join(json.dumps(each) + "\n" for each in lines)
    (workdir / "metrics.jsonl").write_text(text)
    return read_history(workdir), told


def test_merges_and_lives_are_those_of_the_summary(recorded):
    history, told = recorded
    assert history.recorded
    assert history.islands == ("a", "b", "c")
    assert len(history.merges["time"]) == told["merges"]
    for index, name in enumerate(history.islands):
        own = told["islands"][name]
        merged = history.merges["contributions"][:, index]
        assert np.count_nonzero(merged) == own["contributions"]
        lives = history.lives["island"] == name
        assert np.count_nonzero(lives) == own["joins"]
        assert sum(history.lives["steps"][lives]) == own["steps"]
    assert told["islands"]["b"]["joins"] == 2


def test_an_absence_ends_with_the_next_life_s_first_step(recorded):
    history, _ = recorded
    ((ended, seconds),) = history.absences("b")
    (found,) = outages(history)["b"]
    assert found == seconds
    first = history.lives["first_step"][history.lives["island"] == "b"][1]
    assert ended + seconds == pytest.approx(first)
    assert 5 < seconds < 60
    assert outages(history)["a"] == []


def test_takes_and_adoptions_are_of_islands_that_train(recorded):
    history, _ = recorded
    for name in ("takes", "adoptions"):
        rows = history.frame(name)
        assert set(rows.island) == {"a", "b", "c"}
        assert (rows.fragment >= 0).all()
        assert rows.time.between(0, history.merges["time"].max() + 60).all()
    assert (history.frame("adoptions").version >= 1).all(), "joins are none"


def test_steps_fill_the_time_between_lines_but_not_a_pause(recorded):
    history, _ = recorded
    steps = history.frame("steps")
    assert steps.loss.tolist() == [5.0, 4.0, 3.0]
    assert steps.step.tolist() == [0, 2, 3]
    assert steps.time.tolist() == [21, 22, 32]
    assert steps.began.tolist() == [21 - MEDIAN_S, 21, 32 - MEDIAN_S]


def test_measures_come_from_the_metrics(recorded):
    merges = recorded[0].frame("merges").set_index(["fragment", "version"])
    assert merges.norm[0, 1] == 0.5
    assert np.isnan(merges.pairwise_cosine[0, 1])
    assert np.isnan(merges.norm[1, 1]), "the metrics do not have it"


def test_tables_are_written_with_their_columns(recorded, tmp_path):
    history, _ = recorded
    history.write(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(COLUMNS)
    head = (tmp_path / "lives.csv").read_text().splitlines()[0]
    assert head == "island,incarnation,began,first_step,ended,steps,end"
    record(tmp_path)
    early = read_history(tmp_path)
    assert len(early.steps["time"]) == 0, "there are no metrics yet"
    assert len(early.merges["time"]) > 10
    early.plot_timeline()


@pytest.mark.parametrize(("resumed", "ended"), [(False, 4.0), (True, 9.0)])
def test_a_life_ends_when_it_was_last_heard_of(tmp_path, resumed, ended):
    who = {"island": "a", "incarnation": 1}
    lines = [(0.0, {"kind": "begun"}), (1.0, {"kind": "joined", **who})]
    lines.append((4.0, {"kind": "absent", **who, "why": "silent"}))
    if resumed:
        lines.append((6.0, {"kind": "resumed", **who, "steps": 3}))
    lines.append((9.0, {"kind": "left", **who, "steps": 7, "reason": "died"}))
    tape = Tape(tmp_path / "tape.jsonl")
    for at, each in lines:
        tape.append({**each, "time": BEGUN + at})
    tape.close()
    lives = read_history(tmp_path).frame("lives").iloc[0]
    assert (lives.began, lives.ended, lives.steps) == (1.0, ended, 7)
    assert lives.end == "died"


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tape\.jsonl.*give the workdir"):
        read_history(tmp_path)
