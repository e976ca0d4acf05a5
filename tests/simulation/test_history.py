"""The history of a recorded run: what its tape and metrics say, as tables."""

from __future__ import annotations

import json

import numpy as np
import pytest
from emulate_support import BEGUN, make_config, record, with_placement

from diloco_jax import ConfigError, EmulationOptions, read_history
from diloco_jax.observability.history import COLUMNS
from diloco_jax.observability.tape import Tape

MEDIAN_S = 0.5


def line(at, step, loss):
    return {
        **{"kind": "island", "island": "a", "time": BEGUN + at, "step": step},
        "phase": "training",
        **{"loss": loss, "learning_rate": 0.1, "median_step_seconds": MEDIAN_S},
    }


@pytest.fixture(scope="module")
def recorded(text, tmp_path_factory):
    """The history of a tape, and that of the emulation that left it. An island and the
    coordinator are killed."""
    workdir = tmp_path_factory.mktemp("run")
    config = make_config(text, quorum=1, steps=60)
    faults = ("b@13:kill", "coordinator@9:kill")
    config = with_placement(
        config.replace("islands.b.step_seconds", 1.3), faults=faults
    )
    options = EmulationOptions(join_seconds=2.0, down_seconds=4.0)
    result = record(config, options, workdir)
    lines = [line(20, 0, None), line(21, 1, 5.0), line(22, 3, 4.0), line(32, 4, 3.0)]
    first = float(result.history.outages["ended"][0])
    lines.append({**line(first + 2 * MEDIAN_S, 2, None), "island": "b"})
    lines.sort(key=lambda line: line["time"])
    lines.append({"kind": "merge", "time": BEGUN + 30, "fragment": 0, "version": 1})
    lines[-1] |= {"norm": 0.5, "pairwise_cosine": None}
    text = "".join(json.dumps(each) + "\n" for each in lines)
    (workdir / "metrics.jsonl").write_text(text)
    return read_history(workdir), result


def test_the_tape_says_what_happened(recorded):
    history, result = recorded
    assert history.recorded
    assert history.islands == ("a", "b")
    for name, columns in (
        ("merges", ["time", "fragment", "version", "final"]),
        ("merges", ["contributions.a", "contributions.b", "share"]),
        ("takes", ["island", "incarnation", "fragment", "time"]),
        ("adoptions", ["island", "incarnation", "fragment", "version"]),
        ("lives", ["island", "incarnation"]),
    ):
        found, expected = (h.frame(name) for h in (history, result.history))
        found, expected = (
            sorted(each[columns].round(6).itertuples(index=False, name=None))
            for each in (found, expected)
        )
        if name == "adoptions":  # Those before a life's first step are joins on a tape.
            assert set(found) <= set(expected)
            assert len(found) > len(expected) - 3
        else:
            assert found == expected, (name, columns)
    assert (history.frame("adoptions").version >= 1).all(), "joins are none"
    steps, made = (
        {
            (row.island, row.incarnation): row.steps
            for row in h.frame("lives").itertuples()
        }
        for h in (history, result.history)
    )
    assert all(made[who] - 1 <= steps[who] <= made[who] for who in made), "as reported"
    assert result.summary["islands"]["b"]["joins"] == 2


def test_an_absence_ends_with_the_next_life_s_first_step(recorded):
    history, result = recorded
    ((ended, seconds),) = history.absences("b")
    ((died, expected),) = result.history.absences("b")
    assert ended == pytest.approx(died)
    assert seconds == pytest.approx(expected)
    assert expected == result.summary["islands"]["b"]["away_seconds"]
    assert history.absences("a") == []


def test_steps_fill_the_time_between_lines_but_not_a_pause(recorded):
    history, _ = recorded
    steps = history.frame("steps").query("island == 'a'")
    assert steps.loss.tolist() == [5.0, 4.0, 3.0]
    assert steps.step.tolist() == [0, 2, 3]
    assert steps.time.tolist() == [21, 22, 32]
    assert steps.began.tolist() == [21 - MEDIAN_S, 21, 32 - MEDIAN_S]


def test_measures_come_from_the_metrics_and_columns_are_written(recorded, tmp_path):
    history, _ = recorded
    merges = history.frame("merges").set_index(["fragment", "version"])
    assert merges.norm[0, 1] == 0.5
    assert np.isnan(merges.pairwise_cosine[0, 1])
    assert np.isnan(merges.norm[1, 1]), "the metrics do not have it"
    history.write(tmp_path)
    assert {path.stem for path in tmp_path.iterdir()} == set(COLUMNS)
    head = (tmp_path / "lives.csv").read_text().splitlines()[0]
    assert head == "island,incarnation,began,first_step,ended,steps,end"


@pytest.mark.parametrize(("resumed", "ended"), [(False, 4.0), (True, 6.0)])
def test_a_life_ends_when_it_was_last_heard_of(tmp_path, resumed, ended):
    who = {"island": "a", "incarnation": 1}
    joined = {"kind": "joined", **who, "tokens_per_step": 4}
    lines = [(0.0, {"kind": "begun"}), (1.0, joined)]
    lines.append((4.0, {"kind": "absent", **who, "why": "disconnected"}))
    if resumed:
        lines.append((6.0, {"kind": "resumed", **who, "steps": 3}))
    left = {"kind": "left", **who, "steps": 7, "reason": "died", "said": ""}
    lines.append((9.0, {**left, "lost_tokens_by_fragment": [4]}))
    tape = Tape(tmp_path / "tape.jsonl")
    for at, each in lines:
        tape.append({**each, "time": BEGUN + at})
    tape.close()
    history = read_history(tmp_path)  # There are no metrics yet.
    assert len(history.steps["time"]) == 0
    history.plot_timeline()
    lives = history.frame("lives").iloc[0]
    assert (lives.began, lives.ended, lives.steps) == (1.0, ended, 7)
    assert lives.end == "died"


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tape\.jsonl.*give the workdir"):
        read_history(tmp_path)
