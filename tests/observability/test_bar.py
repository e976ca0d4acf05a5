"""Progress on a terminal, and as lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from diloco_jax.observability import terminal
from diloco_jax.observability.terminal import LINE_EVERY_S, bar


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    return now


def test_elsewhere_it_is_a_line_now_and_then_with_the_time_left(clock):
    text = io.StringIO()
    with bar(Console(file=text), "writing") as report:
        report(0.1)
        clock[0] += LINE_EVERY_S - 1
        report(0.2)
        assert not text.getvalue()
        clock[0] += 1
        report(0.25)
        report(0.26)
        clock[0] += LINE_EVERY_S
        report(1.0)
    assert text.getvalue() == "writing: 25%, 0:30 left\n"


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_on_a_terminal_it_is_a_bar_without_colours_if_they_are_not_wanted(variables):
    text = io.StringIO()
    console = Console(
        file=text,
        force_terminal=True,
        color_system="standard",
        width=80,
        _environ={"TERM": "xterm", **variables},
    )
    with bar(console, "writing") as report:
        report(0.5)
    assert "writing" in text.getvalue()
    assert "50%" in text.getvalue()
    coloured = "\x1b[3" in text.getvalue().replace("\x1b[39m", "")
    assert coloured == (not variables)
