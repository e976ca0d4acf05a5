"""A fork without another setting is its run; with one it goes on from the merge."""

import json
import os
import re
import shutil
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from emulate_support import check_books, make_config, record, with_placement
from rich.console import Console
from test_replay import Here

from diloco_jax import EmulationOptions, before_jax, cli, emulate, load_params
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.data.loading import load_data
from diloco_jax.data.source import Skipping
from diloco_jax.observability.history import plot_losses, read_history
from diloco_jax.simulation import fork
from diloco_jax.simulation.replay import replay
from diloco_jax.simulation.replay.recording import read_recording

PAGE = (Path(__file__).parents[2] / "docs" / "replay.md").read_text()
AT = 4
"""The merge of the forks here; all that is merged by then was trained by step 8."""
POISONED = (41, 42)
"""Positions of step 10 of `a`, in its first lease."""
STEPS = 28


@pytest.fixture(scope="module")
def parent(text, tmp_path_factory):
    """(workdir, result, poisoned rows) of a run with two rows of other letters."""
    config = make_config(text, quorum=1, steps=STEPS)
    data = load_data(config.run)
    index, letters = data.index(config.run.seed), np.random.default_rng(1)
    rows = [index.number(position) for position in POISONED]
    for row in rows:
        window = bytes(data.train[row]["tokens"][1:-1].tolist())
        (file,) = [f for f in os.scandir(text) if window in read(f)]
        poison = bytes(letters.integers(ord("A"), ord("z"), len(window)).tolist())
        with open(file, "r+b") as opened:
            opened.seek(read(file).index(window))
            opened.write(poison)
    config = with_placement(
        make_config(text, quorum=1, steps=STEPS), merge_route="xla", evaluate_batches=1
    )
    workdir = tmp_path_factory.mktemp("parent")
    return workdir, record(config, EmulationOptions(), workdir), rows


def read(file):
    with open(file, "rb") as opened:
        return opened.read()


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    monkeypatch.setattr(replay, "Worker", Here)
    with mock.patch.dict(os.environ):
        yield


def forked(parent, capsys, *options, at=AT):
    """Return exit code, JSON and text of `diloco fork` with these options."""
    arguments = ["fork", parent[0], "--json", *options, *([f"--at={at}"] if at else [])]
    code = cli.main(list(map(str, arguments)))
    said = capsys.readouterr()
    return code, json.loads(said.out or "{}"), " ".join(said.err.split())


def of_page(number, child):
    """Return the options of one of the page's forks, which writes to `child`."""
    lines = re.findall(r"^diloco fork runs/first (.*)--workdir", PAGE, re.MULTILINE)
    return [*lines[number].replace("v6e", "b").split(), "--workdir", child]


def spike(history, after_s, until_s=1e9):
    """Return the highest loss of a step of `a` in this time."""
    steps = history.frame("steps").query("island == 'a'")
    return steps.loss[(steps.time > after_s) & (steps.time <= until_s)].max()


def test_without_another_setting_it_is_the_run(parent, tmp_path, capsys):
    result = parent[1]
    options = of_page(0, tmp_path / "same")
    code, found, said = forked(parent, capsys, *options, at=0)
    assert (code, found["identical"]) == (0, True), said
    merges = len(result.history.merges["time"])
    assert found["merges"] == found["merges_on_tape"] == merges
    assert "no setting is changed, so the fork is the run itself" in said
    same = jax.tree.map(np.array_equal, load_params(tmp_path / "same"), result.params)
    assert jax.tree.all(same)
    code, _, said = forked(parent, capsys, *options, at=0)
    assert (code, "same exists already; name a new folder" in said) == (2, True)


def test_a_fork_before_a_spike_has_none_if_its_rows_are_skipped(
    parent, tmp_path, capsys
):
    workdir, result, _ = parent
    options = of_page(1, tmp_path / "child")
    code, summary, said = forked(parent, capsys, *options, at=0)
    assert code == 0, said
    assert "island a: moments of incarnation 1 after step 8" in said
    history, before = read_history(tmp_path / "child"), read_history(workdir)
    begins = before.merges["time"][AT - 1]
    usual = spike(result.history, begins - 4, begins)
    assert spike(result.history, begins) > usual
    assert spike(history, begins) < spike(result.history, begins) - 1.5
    assert history.merges["time"][0] > begins, "the clock goes on"
    assert history.merges["version"][:2].tolist() == [3, 3]
    assert summary["tokens"] == summary["total_tokens"]
    lost = sum(summary["tokens_lost"].values())
    books = summary["tokens_merged"] + lost + summary["tokens_in_flight"]
    assert summary["tokens_computed"] == books
    assert summary["goodput"] == pytest.approx(1, abs=0.1), "of the fork alone"
    assert summary["tokens_predicted"] < summary["tokens_computed"] - 8 * 96
    assert (tmp_path / "child" / "fork.png").read_bytes().startswith(b"\x89PNG")


def test_rules_and_islands_may_be_others(parent, tmp_path, capsys):
    options = of_page(2, tmp_path / "child")
    options += ["--outer.norm-guard", "2", "--evaluate-every-tokens", "640"]
    code, summary, said = forked(parent, capsys, *options, at=0)
    assert code == 0, said
    assert "island c: fresh moments" in said
    assert "sync.merge: 'mean' in the fork, 'rda' in the run" in said
    history = read_history(tmp_path / "child")
    assert history.islands == ("a", "c")
    assert (history.merges["contributions"].sum(0) > 0).all()
    assert summary["islands"]["a"]["incarnation"] == 2
    begins = read_history(parent[0]).merges["time"][AT - 1]
    usual = spike(parent[1].history, begins - 4, begins)
    assert spike(history, begins) > usual, "nothing is skipped"
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    exec(re.sub("runs/(first|calm)", str(tmp_path / "child"), block), {})
    axes = plot_losses({"fork": history}, over="seconds")
    assert axes.lines[0].get_xdata()[0] > begins
    axes = history.plot_loss(parent=parent[1].history)
    names = axes.get_legend_handles_labels()[1]
    assert {"a", "c", "a, parent", "b, parent"} <= set(names)


def test_a_row_that_is_skipped_is_computed_and_not_predicted(text, monkeypatch):
    rows, get = [], Skipping.__getitem__

    def noted(source, row):
        rows.append(row)
        return get(source, row)

    monkeypatch.setattr(Skipping, "__getitem__", noted)
    config = make_config(text, steps=8)
    options = EmulationOptions(skip_rows=((0, 300), (250, 310)))
    result = emulate(config, options=options)
    check_books(result)
    learned = sum(row >= 310 for row in rows)
    assert 0 < learned < len(rows) == 8 * 6
    assert result.summary["tokens_computed"] == 8 * 6 * 16
    assert result.summary["tokens_predicted"] == learned * 16


@pytest.mark.parametrize(
    "ranges",
    [[(2, 3), (0, 1), (1, 2)], [(5, 9), (0, 7)], [(-4, 2), (8, 30)], [(3, 4), (3, 4)]],
)
def test_ranges_of_skipped_rows_may_come_in_any_order(ranges):
    tens = mock.MagicMock(fields={})
    tens.__getitem__.return_value = {"tokens": np.zeros(3, np.int32)}
    found = [bool(Skipping(tens, ranges)[row]["weights"].sum()) for row in range(10)]
    assert found == [not any(a <= row < b for a, b in ranges) for row in range(10)]


def test_rows_of_merges_are_those_that_their_steps_drew(parent):
    recording = read_recording(parent[0])
    rows = {row for row, _ in fork.rows_of(recording, AT + 1, AT + 2)}
    assert set(parent[2]) <= rows
    parts = {
        (part.island, step)
        for merge in recording.merges[AT : AT + 2]
        for part in merge.made.contributions
        for step in range(part.start, part.end)
    }
    assert len(rows) == sum({"a": 4, "b": 2}[island] for island, _ in parts)


def test_what_was_written_is_read_again(parent, tmp_path):
    history = parent[1].history
    history.write(tmp_path / "history")
    again = read_history(tmp_path)
    assert again.islands == history.islands
    for name in ("merges", "steps", "takes", "adoptions", "lives", "evaluations"):
        for key, values in getattr(history, name).items():
            np.testing.assert_array_equal(getattr(again, name)[key], values)


@pytest.mark.parametrize(
    ("options", "at", "answer"),
    [
        ([], 99, "--at 99: {tape} has merges 1 to 15; choose one"),
        (["--sync.quorum=2"], 15, "--at 15: {run} had its 2688 tokens before that"),
        (["--skip-merges", 5, 99], 4, "--skip-merges 99: {tape} has merges 1 to 15"),
        (["--skip-merges", 4, 6], 4, "at = 4, skip_merges = 4 6; give --at, the last"),
        (["--skip-rows", 0, 999], 4, "0 999, and the training data has rows 0 to 615"),
        (["--also", "a", "b"], 4, "also has 'a', which the run has already (b, a)"),
        (["--without", "c"], 4, "no island 'c' in this config"),
    ],
)
def test_what_cannot_be_is_refused(parent, options, at, answer, capsys):
    code, _, said = forked(parent, capsys, *options, at=at)
    wanted = answer.format(run=parent[0], tape=parent[0] / "tape.jsonl")
    assert (code, wanted in said) == (2, True), said


def test_a_fork_keeps_the_plan_of_fragments(parent, monkeypatch, capsys):
    """Merge rule and outer optimizer say what may be cut; it was seen after replay."""
    monkeypatch.setattr(FragmentPlan, "digest", lambda plan: "0123")
    code, _, said = forked(parent, capsys, "--sync.merge=mean")
    assert code == 2
    assert "sync.merge: 'mean' in the fork" in said
    assert "in the run and 0123 with these, since" in said


def test_a_fork_without_error_feedback_has_no_residuals(parent):
    recording = read_recording(parent[0], until=AT)
    for feeds in (True, False):
        config = recording.config.replace("sync.error_feedback", feeds)
        quiet = Console(quiet=True)
        point = fork.point_of(recording, config, 0.0, {}, quiet)
        assert all(bool(one.residuals) == feeds for one in point.islands.values())


def test_a_fork_never_writes_into_its_run(parent, tmp_path, capsys):
    """A copy with config and tape alone looks like a run that came to nothing."""
    copied = tmp_path / "copied"
    copied.mkdir()
    for name in ("config.json", "tape.jsonl"):
        shutil.copy(parent[0] / name, copied)
    options = ["--without", "b", "--workdir", tmp_path / "." / "copied"]
    code, _, said = forked((copied,), capsys, *options)
    assert (code, "is the run itself; name a new folder" in said) == (2, True), said
    assert {path.name for path in copied.iterdir()} == {"config.json", "tape.jsonl"}


def test_a_run_that_does_not_repeat_here_has_another_way(parent, monkeypatch, capsys):
    here = {**before_jax.describe_environment(), "cpu": "another"}
    monkeypatch.setattr(before_jax, "describe_environment", lambda: here)
    code, _, said = forked(parent, capsys, "--sync.merge", "mean")
    assert code == 2
    assert "here it is 'another'" in said
    assert f"`diloco export {parent[0]} DIR --cycle C`" in said
    assert "--init hf:DIR` begins from them, with fresh moments and no promise" in said
