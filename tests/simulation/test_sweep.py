"""Settings and seeds, compared pair by pair; rules that a notebook's cell defines."""

from __future__ import annotations

import dataclasses
import re
import sys

import numpy as np
import pytest
from emulate_support import make_config
from scipy import stats

from diloco_jax import (
    ConfigError,
    EmulationOptions,
    LocalCluster,
    Sweep,
    emulate,
    sweep,
)
from diloco_jax.core.merging import MEAN
from diloco_jax.observability.history import plot_losses

SETTINGS = {"K = 2": {}, "K = 1": {"sync.quorum": 1, "inner.learning_rate": 2e-2}}
SEEDS = (3, 5)
OPTIONS = EmulationOptions(merge_seconds=0.5)


@pytest.fixture(scope="module")
def found(text):
    return sweep(make_config(text), SETTINGS, seeds=SEEDS, options=OPTIONS)


def test_runs_are_those_of_emulate(found, text):
    config = make_config(text).replace({"seed": SEEDS[1], **SETTINGS["K = 1"]})
    alone = emulate(config, options=OPTIONS)
    one = found.runs["K = 1"][1]
    assert one.summary["eval_loss"] == alone.summary["eval_loss"]
    assert len(one.history.evaluations["loss"]) == 9, "one a merge, and the end"
    assert len(alone.history.evaluations["loss"]) == 0, "none was asked for"


def test_the_table_compares_runs_of_one_seed(found):
    table = found.table()
    losses = {
        label: [run.summary["eval_loss"] for run in runs]
        for label, runs in found.runs.items()
    }
    over = [100 * (b / a - 1) for a, b in zip(*losses.values(), strict=True)]
    low, _ = stats.t.interval(0.95, 1, np.mean(over), stats.sem(over))
    row = table.loc["K = 1"]
    assert row.over_first == pytest.approx(np.mean(over))
    assert row.half == pytest.approx(np.mean(over) - low)
    assert abs(row.over_first) > 0
    assert table.loc["K = 2", ["over_first", "half"]].tolist() == [0, 0]
    assert list(table["runs"]) == [2, 2]
    before = [run.history.evaluations["loss"][-2] for run in found.runs["K = 1"]]
    assert row.before_flush == pytest.approx(np.mean(before))
    assert "K = 1" in found._repr_html_()


def test_a_run_shows_its_numbers(found):
    run = found.runs["K = 1"][1]
    lost = {"died": 3, "stopped": 4}
    shown = dataclasses.replace(run, summary={**run.summary, "tokens_lost": lost})
    assert "<th>tokens_lost</th><td>7</td>" in shown._repr_html_()
    merged = f"{run.summary['tokens_merged']:,}"
    assert re.fullmatch(
        rf"<Emulation of .*: eval_loss = .*, {merged} tok.*>", repr(run)
    )
    assert f"<th>tokens_merged</th><td>{merged}</td>" in run._repr_html_()


def test_a_curve_ends_with_the_last_merge(found):
    for run in (run for runs in found.runs.values() for run in runs):
        merges, judged = run.history.merges, run.history.evaluations
        assert judged["time"][-1] == merges["time"][-1]
        assert merges["final"][-1], "it is of the flush, which adds no tokens"
        assert judged["loss"][-1] < judged["loss"][0]


def test_one_seed_has_no_interval(found):
    once = dataclasses.replace(
        found, seeds=(3,), runs={label: runs[:1] for label, runs in found.runs.items()}
    )
    assert np.isnan(once.table().half).all()


def test_a_plot_has_a_line_of_each_run_and_a_colour_of_each_setting(found):
    for over, column in (("tokens", "tokens"), ("seconds", "time")):
        axes = found.plot_loss(over=over)
        lines = axes.get_lines()
        assert len({line.get_color() for line in lines}) == 2
        labels = [text.get_text() for text in axes.get_legend().get_texts()]
        assert labels == list(SETTINGS)
        # Of each run up to the last merges, and what these change.
        before, ending = lines[2].get_xdata(), lines[3].get_xdata()
        judged = list(found.runs["K = 2"][1].history.evaluations[column])
        assert [*before, ending[-1]] == judged
        assert list(ending) == judged[-2:]
        # The loss before the flush is that of the last merge before it.
        merges = found.runs["K = 2"][1].history.merges
        last = np.flatnonzero(~merges["final"])[-1]
        assert ending[0] == merges[column][last]
        assert (
            axes.get_xlabel()
            == {"tokens": "tokens", "seconds": "virtual seconds"}[over]
        )


@pytest.mark.parametrize(
    ("over_first", "half", "title"),
    [
        (-1.6, 3.1, "2 seeds: no setting ends apart from {}"),
        (-1.6, float("nan"), "2 seeds: no setting ends apart from {}"),
        (-1.6, 0.4, "{} ends 1.6 % below {}"),
        (2.0, 0.4, "{} ends 2.0 % above {}"),
    ],
)
def test_a_plot_is_titled_by_what_is_no_chance(
    found, monkeypatch, over_first, half, title
):
    first, second = SETTINGS
    table = found.table()
    table.loc[second, ["over_first", "half"]] = over_first, half
    monkeypatch.setattr(Sweep, "table", lambda _: table)
    names = (second, first)[-title.count("{}") :]
    shown = found.plot_loss().get_title(loc="left")
    assert shown == f"{title.format(*names)}; dotted: the flush"


def test_losses_of_unlike_batches_have_no_winner(found):
    history = found.runs["K = 1"][0].history
    both = {"run": dataclasses.replace(history, recorded=True), "fork": history}
    title = plot_losses(both, over="seconds").get_title(loc="left")
    assert title == "recorded and emulated losses, of unlike batches"


def test_what_cannot_be_drawn_says_why(found):
    history = found.runs["K = 1"][0].history
    tokens = np.full_like(history.evaluations["loss"], np.nan)
    recorded = dataclasses.replace(
        history, evaluations={**history.evaluations, "tokens": tokens}, recorded=True
    )
    for run, remedy in (
        (recorded, "placement.watch_every has some made, by 'seconds' alone"),
        (dataclasses.replace(recorded, recorded=False), "EmulationOptions"),
    ):
        with pytest.raises(ConfigError, match=rf"'v5p' has \d+ eval.*{remedy}"):
            plot_losses({"v5p": run})
    with pytest.raises(ConfigError, match="end = 2 s is not after begin = 4 s"):
        history.plot_timeline(4, 2)
    for wrong in (found, found.runs["K = 1"][0], found.runs["K = 1"]):
        with pytest.raises(ConfigError, match=r"'mine' is no History.*found\.history"):
            plot_losses({"mine": wrong})
    for wrong, said in (([history], "a list"), ({}, "an empty dict")):
        with pytest.raises(ConfigError, match=rf"histories is {said}; give a dict"):
            plot_losses(wrong)
    with pytest.raises(ConfigError, match="over = 'steps'; choose from tokens, sec"):
        found.plot_loss(over="steps")
    assert plot_losses({"v5p": recorded}, over="seconds").get_xlabel() == "seconds"


@pytest.mark.parametrize(
    ("settings", "seeds", "message"),
    [
        ({"a": {}, "b": {"sync.quorum": 3}}, [0], "setting 'b': sync.quorum = 3"),
        ({"a": {"sync.qorum": 3}}, [0], "setting 'a': no field 'sync.qorum'.*did you"),
        (
            {"a": {}, "b": {"sync.fragments": 10_000}},
            [0],
            "setting 'b': sync.fragments = 10000",
        ),
        ({"a": {}}, [4, 4], "one comes twice"),
        ({"a": {}, "b": {"seed": 3}}, [0], "setting 'b' has 'seed'; give seeds"),
        ({}, [0], "settings has 0 entries"),
        ({"a": {}}, [], "seeds has 0"),
        ({"a": {}}, 3, r"seeds = 3; give each of them, as in range\(3\)"),
        (
            [{}, {"sync.quorum": 1}],
            [0],
            r"settings = \[.*; give a dict with the fields",
        ),
        ({"a": ["sync.quorum"]}, [0], r"settings = {'a': .*as in {'K = 2': {}, 'K"),
    ],
)
def test_a_wrong_sweep_is_refused_before_any_run(
    text, settings, seeds, message, monkeypatch
):
    monkeypatch.setattr("diloco_jax.simulation.sweep.emulate", pytest.fail)
    with pytest.raises(ConfigError, match=message):
        sweep(make_config(text), settings, seeds=seeds)


# ---- a rule in a cell ---------------------------------------------------------------


class Half:
    """Merges half of the mean, or another part of it."""

    needs = "sum"
    by_element = keeps_length = False
    keeps_equal = embeddings_by_mean = flush_by_mean = False
    extra_copies = 0

    def __init__(self, part: float) -> None:
        self.part = part

    def factors(self, weights, squares):
        return [self.part * weight for weight in weights]

    def scale(self, weights, squares, square):
        return 1.0

    def direction_square(self, square):
        return None


def test_a_cell_s_rule_is_used_and_its_next_definition_too(text, monkeypatch):
    config = make_config(text).replace("sync.merge", "__main__:MyRule")
    main = sys.modules["__main__"]
    with pytest.raises(ConfigError, match=r"sync\.merge.*__main__ has no 'MyRule'"):
        emulate(config)
    monkeypatch.setattr(main, "MyRule", MEAN, raising=False)
    mean = emulate(config).summary["eval_loss"]
    monkeypatch.setattr(main, "MyRule", Half(0.5))
    half = emulate(config).summary["eval_loss"]
    assert mean == emulate(config.replace("sync.merge", "mean")).summary["eval_loss"]
    assert half != mean
    monkeypatch.setattr(main, "MyRule", object())
    with pytest.raises(ConfigError, match=r"sync\.merge = '__main__:MyRule'"):
        emulate(config)


def test_a_run_asks_for_the_file_of_a_cell_s_rule(text, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "MyRule", MEAN, raising=False)
    config = make_config(text).replace("sync.merge", "__main__:MyRule")
    with pytest.raises(ConfigError, match=r"give 'path/to/file.py:MyRule'"):
        LocalCluster(config)
