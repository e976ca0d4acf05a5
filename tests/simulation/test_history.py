"""The history of a recorded run: what its tape and metrics say, as tables."""

from __future__ import annotations

import json

import numpy as np
import pytest
from virtual_recording import BEGUN, record

from diloco_jax import ConfigError, read_history
from diloco_jax.observability.history import COLUMNS, outages

MEDIAN_S = 0.5


def line(at, step, loss):
    return {
        **{"kind": "island", "island": "a", "time": BEGUN + at, "step": step},
        **{"loss": loss, "learning_rate": 0.1, "median_step_seconds": MEDIAN_S},
    }


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    summary = record(workdir)
    lines = [line(20, 0, None), line(21, 1, 5.0), line(22, 3, 4.0), line(32, 4, 3.0)]
    lines.append({"kind": "merge", "time": BEGUN + 30, "fragment": 0, "version": 1})
    lines[-1] |= {"norm": 0.5, "pairwise_cosine": None}
    text = "".join(json.dumps(each) + "\n" for each in lines)
    (workdir / "metrics.jsonl").write_text(text)
    return read_history(workdir), summary


def test_merges_and_lives_are_those_of_the_summary(recorded):
    history, summary = recorded
    assert history.recorded
    assert history.islands == ("a", "b", "c")
    assert len(history.merges["time"]) == summary["merges"]
    for index, name in enumerate(history.islands):
        own = summary["islands"][name]
        merged = history.merges["contributions"][:, index]
        assert np.count_nonzero(merged) == own["contributions"]
        lives = history.lives["island"] == name
        assert np.count_nonzero(lives) == own["joins"]
        assert sum(history.lives["steps"][lives]) == own["steps"]
    assert summary["islands"]["b"]["joins"] == 2


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


def test_a_run_without_metrics_has_no_steps_yet(tmp_path):
    record(tmp_path)
    history = read_history(tmp_path)
    assert len(history.steps["time"]) == 0
    assert len(history.merges["time"]) > 10
    history.plot_timeline()


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tape\.jsonl.*give the workdir"):
        read_history(tmp_path)
