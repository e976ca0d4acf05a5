"""Plots of a history: what they say, and that nothing lies over anything else."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from matplotlib import pyplot
from matplotlib.text import Text

from diloco_jax import History
from diloco_jax.observability.history import COLUMNS, MOST_BARS, of_rows, table


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    monkeypatch.setattr(pyplot, "show", lambda: None)
    yield
    pyplot.close("all")


def history(count: int = 20, **changes) -> History:
    """Steps of 1 s of "a" and "b"; "c" dies at 5 s and is back at 12 s."""
    steps = []
    for name in "ab":
        for step in range(count):
            steps.append((name, 1, step, float(step), step + 1.0, 5.0 - step, 0.1))
    for step in range(5):
        steps.append(("c", 1, step, float(step), step + 1.0, 4.0, 0.1))
    for step in range(6):
        steps.append(("c", 2, step, 12.0 + step, 13.0 + step, 3.0, 0.1))
    zeros = (0.0,) * 4
    rows = {
        "merges": [(4.0, 1, 0, 1, False, [1, 1, 1], 1.0, 0.1, "x", *zeros)],
        "steps": steps,
        "takes": [("a", 1, 0, 3.0, 3.5)],
        "adoptions": [("a", 1, 0, 1, 4.5)],
        "lives": [
            ("a", 1, 0.0, 0.0, 20.0, 20, "finished"),
            ("c", 1, 0.0, 0.0, 5.0, 5, "died"),
            ("c", 2, 10.0, 12.0, 18.0, 6, "finished"),
        ],
        "outages": [("c", 1, 5.0, 12.0, "its machine was taken away")],
        "evaluations": [(2.0, 1, 4.5)],
    }
    return dataclasses.replace(of_rows(("a", "b", "c"), rows), **changes)


def texts_of(axes) -> list[Text]:
    figure = axes.figure
    figure.canvas.draw()
    return [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip()
    ]


def overlaps(axes) -> list[tuple[str, str]]:
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts_of(axes)]
    return [
        (a, b)
        for (a, one), (b, other) in itertools.combinations(boxes, 2)
        if one.overlaps(other)
    ]


def test_the_title_of_a_timeline_says_who_was_away():
    axes = history().plot_timeline()
    assert axes.get_title("left") == "c is away for 7 s"
    assert axes.get_xlabel() == "virtual seconds"
    assert [t.get_text() for t in axes.get_yticklabels()] == ["merges", *"abc"]
    assert "away 7 s" in [text.get_text() for text in axes.texts]


def test_without_an_absence_it_says_how_many_islands_and_merges():
    none = table(COLUMNS["outages"], [])
    recorded = history(outages=none, recorded=True).plot_timeline()
    assert recorded.get_title("left") == "3 islands, 1 merge"
    assert recorded.get_xlabel() == "seconds since the run began"


def test_bars_are_steps_and_join_when_there_are_too_many():
    bars = [c for c in history().plot_timeline().collections if len(c.get_paths()) > 1]
    assert [len(c.get_paths()) for c in bars] == [20, 20, 11]
    for joined in (history(count=MOST_BARS + 1), history(recorded=True)):
        lanes = joined.plot_timeline().collections
        assert [len(c.get_paths()) for c in lanes][:2] == [1, 1]


def test_the_loss_says_from_where_to_where():
    axes = history().plot_loss(final=1.25)
    assert axes.get_title("left").startswith("The loss falls from 5.00 to 1.25 in 20 ")
    assert axes.get_ylabel() == "loss, nats per token"
    labels = axes.get_legend_handles_labels()[1]
    assert labels == ["a", "b", "c", "merged, validation", "merged, validation: 1.25"]
    styles = {(x.get_color(), x.get_linestyle()) for x in axes.lines[:3]}
    assert len({colour for colour, _ in styles}) == 3
    assert len({style for _, style in styles}) == 3, "to be told apart in grey"


def test_axes_and_title_of_the_caller_are_used():
    _, (left, right) = pyplot.subplots(1, 2)
    assert history().plot_loss(axes=left, title="mine") is left
    assert left.get_title("left") == "mine"
    assert history().plot_timeline(axes=right) is right


@pytest.mark.parametrize("plot", ["plot_timeline", "plot_loss"])
def test_no_label_lies_on_another(plot):
    assert not overlaps(getattr(history(), plot)())


def test_the_key_lies_beside_the_lanes():
    axes = history().plot_timeline()
    axes.figure.canvas.draw()
    key = axes.get_legend().get_window_extent()
    assert not key.overlaps(axes.get_window_extent())
