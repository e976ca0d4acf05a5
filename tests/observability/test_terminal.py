"""The live view, rendered to text; progress on a terminal, and as lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from diloco_jax.faults import parse_faults
from diloco_jax.observability import terminal
from diloco_jax.observability.terminal import (
    LINE_EVERY_S,
    Dashboard,
    bar,
    bytes_text,
    closing_report,
    comparison,
    duration_text,
    render,
)

AWAY = {"address": "", "pid": 0, "fragments": 2, "memory_bytes": 0}
STATUS = {
    "phase": "running",
    "tokens": 250_000,
    "total_tokens": 1_000_000,
    "progress": 0.25,
    "merges": 34,
    "goodput": 0.93,
    "bytes_up_per_second": 34_000,
    "bytes_down_per_second": 1_200_000,
    "alerts": ["one", "two", "three", "four"],
    "islands": {
        "v6e": {
            "state": "training",
            "incarnation": 1,
            "steps": 1234,
            "tokens_per_second": 2275.0,
            "loss": 2.5,
            "eval_loss": None,
            "participation": 0.97,
            "version": 12,
            "bytes_up": 12_300_000,
            "bytes_down": 999,
        },
        "v5p-b": {"state": "restarting", "incarnation": 2, "loss": float("nan")},
    },
}


def text_of(renderable, width=160, **terminal):
    console = Console(file=io.StringIO(), width=width, **terminal)
    console.print(renderable)
    return console.file.getvalue()


def test_table_has_a_row_per_island_with_what_is_known():
    rows = {line.split()[0]: line for line in text_of(render(STATUS, 90)).splitlines()}
    v6e = rows["v6e"]
    for shown in ("training", "1,234", "2,275", "2.500", "97%", "12.3 MB", "999 B"):
        assert shown in v6e
    assert "restarting #2" in rows["v5p-b"]
    assert "nan" not in rows["v5p-b"]
    assert "34.0 kB/s up, 1.2 MB/s down" in text_of(render(STATUS, 90))


@pytest.mark.parametrize("terminal", [{}, {"force_terminal": True}], ids=str)
@pytest.mark.parametrize("colour", [None, "standard"])
def test_the_headline_has_a_line_of_its_own(terminal, colour):
    seen = text_of(render(STATUS, 90), 60, color_system=colour, **terminal)
    (line,) = [line for line in seen.splitlines() if "running" in line]
    assert line.startswith("running")
    assert seen.lstrip("\x1b[0123456789;m").startswith("degraded: v5p-b restarting")
    assert "25% of 1,000,000 tokens | 34 merges" in line


def test_the_table_fits_into_eighty_columns():
    text = text_of(render(STATUS, 90.0), width=80)
    assert "12.3 MB" in text
    assert "…" not in text


def test_evaluations_have_a_column_once_there_are_any():
    assert "eval" not in text_of(render(STATUS, None))
    island = {"state": "training", "eval_loss": 2.25}
    text = text_of(render({"islands": {"v6e": island}}, None))
    assert "eval" in text
    assert "2.250" in text


def test_only_the_latest_alerts_are_shown():
    text = text_of(render(STATUS, None))
    assert "! four" in text
    assert "! one" not in text


def test_workers_are_shown_with_where_they_serve_or_that_they_are_away():
    known = {"pid": 7, "fragments": 3, "memory_bytes": 1_200_000}
    here = {"worker": 0, "address": "127.0.0.1:7079", **known}
    text = text_of(render({**STATUS, "workers": [here, {"worker": 1, **AWAY}]}, None))
    assert "worker 0: 127.0.0.1:7079, 3 fragments, 1.2 MB" in text
    assert "worker 1: away, 2 fragments, 0 B" in text


def test_time_left_follows_the_speed_since_the_first_progress():
    dashboard = Dashboard(Console(file=io.StringIO()))
    assert dashboard.seconds_left(0.0, 0.0) is None
    assert dashboard.seconds_left(0.1, 100.0) is None
    assert dashboard.seconds_left(0.3, 120.0) == pytest.approx(70.0)


def test_without_a_terminal_there_is_a_line_now_and_then():
    console = Console(file=io.StringIO(), width=40)
    with Dashboard(console) as dashboard:
        for second in range(25):
            dashboard.show({**STATUS, "alerts": []}, float(second))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 3
    assert "v6e training 1,234 loss 2.500" in lines[0]


def test_without_a_terminal_each_alert_is_told_when_it_comes():
    console = Console(file=io.StringIO(), width=40)
    alerts = [[], ["one of [b]"], ["one of [b]"], ["one of [b]", "two"], ["two"]]
    with Dashboard(console) as dashboard:
        for number, now in enumerate(alerts):
            dashboard.show({**STATUS, "alerts": now}, 100.0 * number)
    lines = console.file.getvalue().splitlines()
    assert [text for text in lines if text[0] == "!"] == ["! one of [b]", "! two"]
    assert len(lines) == len(alerts) + 2


def test_units():
    assert [bytes_text(n) for n in (12, 1500, 2e9, 3e13)] == [
        "12 B",
        "1.5 kB",
        "2.0 GB",
        "30.0 TB",
    ]
    assert [duration_text(s) for s in (5, 65, 3661)] == ["0:05", "1:05", "1:01:01"]


def tokens(computed, merged, lost, joins=1, gap=0.7):
    return {
        "tokens_computed": computed,
        "tokens_merged": merged,
        "tokens_lost": {"killed": lost},
        "tokens_in_flight": 0,
        "joins": joins,
        "median_step_seconds": 0.5,
        "max_step_gap_seconds": gap,
    }


SUMMARY = {
    **tokens(1000, 900, 100),
    "eval_loss": 2.0,
    "eval_bits_per_byte": 2.8854,
    "goodput": 0.91,
    "uptime": 1.0,
    "merges": 24,
    "wall_seconds": 300,
    "islands": {"v6e": tokens(600, 600, 0), "v5p": tokens(400, 300, 100, joins=2)},
}


def failed(seconds, **more):
    facts = {"who": "v5p", "at_seconds": 62.0, "seconds": seconds}
    facts |= dict.fromkeys(terminal.COSTS, 0) | {"merged_after_seconds": None}
    return {**facts, "why": "its machine was taken away", **more}


STOPS = {
    **{**tokens(400, 300, 100, joins=3), "resumed": 1},
    "tokens_lost": {"died": 60, "stopped": 40},
}
ASKED = {**tokens(400, 360, 40, joins=2), "tokens_lost": {"stopped": 40}}
UNJUDGED = {k: v for k, v in SUMMARY.items() if not k.startswith("eval")}


@pytest.mark.parametrize(
    ("summary", "said", "unsaid"),
    [
        (
            {**SUMMARY, "alerts": ["island v5p never made a step"]}
            | {"failures": [failed(7.25, tokens_lost=100, merged_after_seconds=8.0)]},
            [
                "validation loss 2.0000 nats per token, 2.8854 bits per byte",
                "goodput 0.910",
                "1:02 v5p failed for 7.2 s: its machine was taken away; 100 tokens "
                "lost, merged again 8.0 s after it began\n\n"
                "the others' longest gap between two steps:\n"
                "  v6e      0.700 s = 1.4 medians of 0.500 s",
                "\nalert: island v5p never made a step",
            ],
            [],
        ),
        (
            {**SUMMARY, "failures": [failed(7.25), failed(None)]},
            [
                "v5p failed for 7.2 s: its machine was taken away\n1:02 v5p failed to "
                "the end: ",
            ],
            ["alert", "before these"],
        ),
        (
            {**SUMMARY, "failures": [failed(float(n)) for n in range(13)]},
            ["3 failures before these", "for 3.0 s", "for 12.0 s"],
            ["for 2.0 s"],
        ),
        (
            {"islands": {"v6e": tokens(1, 1, 0), "v5p": STOPS}},
            ["stopping the run as a whole cost 40 tokens"],
            ["longest gap"],
        ),
        (
            {"islands": {"v6e": {**ASKED, "resumed": 1}}},
            ["stopping the run as a whole cost 40 tokens"],
            ["failed"],
        ),
        (
            {"phase": "done", "islands": {"v6e": ASKED}},
            [],
            ["as a whole", "longest gap"],
        ),
        (
            {"islands": {"v6e": tokens(1, 1, 0)}},
            ["not evaluated"],
            ["failed", "longest gap"],
        ),
        ({"islands": {}, "eval_loss": None}, ["not finite"], []),
        ({**UNJUDGED, "phase": "evaluating"}, ["being evaluated"], ["stopped"]),
        ({**UNJUDGED, "phase": "done"}, ["not evaluated"], ["stopped"]),
        ({**UNJUDGED, "phase": "stopped"}, ["stopped before its end"], []),
    ],
)
def test_the_report_tells_what_the_run_did_and_what_failures_cost_whom(
    summary, said, unsaid
):
    report = closing_report(summary)
    assert [text for text in said if text not in report] == []
    assert [text for text in unsaid if text in report] == []


def test_comparison_is_relative_to_the_baseline():
    baseline = {"eval_loss": 1.6, "tokens": 1000, "learning_rate": 1e-3}
    text = comparison({"eval_loss": 2.0}, baseline)
    assert "loss 1.6000; this run 2.0000, +25.0%" in text
    for missing in ({}, {"eval_loss": None}):
        assert "missing, or not finite" in comparison(missing, baseline)


@pytest.mark.parametrize("name", ["v6e", "europe-west4-v5p-128"])
def test_columns_of_the_report_stand_under_their_heads(name):
    islands = {name: tokens(600, 600, 0), "b": tokens(400, 300, 100)}
    lines = closing_report({**SUMMARY, "islands": islands}).splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("tokens "))
    table = lines[head : head + len(islands) + 2]
    assert [line.split()[0] for line in table] == ["tokens", name, "b", "total"]
    assert len({len(line) for line in table}) == 1


FAULTS = parse_faults(
    ["v5p@200:kill", "v6e@50:pause3", "v5p#3@1:kill", "coordinator@25:kill"],
    ["v5p", "v6e"],
)


def test_report_names_the_faults_that_never_struck():
    v5p, v6e = SUMMARY["islands"]["v5p"], SUMMARY["islands"]["v6e"]
    made = {"v5p": {**v5p, "steps": 74, "joins": 1}, "v6e": {**v6e, "steps": 60}}
    report = closing_report({**SUMMARY, "islands": made}, FAULTS)
    told = [line for line in report.splitlines() if "never struck" in line]
    assert told == [
        "the fault v5p@200:kill never struck: v5p made 74 steps",
        "the fault v5p#3@1:kill never struck: v5p made 74 steps, and its joins were 1",
        "the fault coordinator@25:kill never struck: coordinator made 24 merges",
    ]
    # It was killed before its report of step 200, and came back.
    made["v5p"] |= {"steps": 199, "joins": 2}
    report = closing_report({**SUMMARY, "islands": made}, FAULTS)
    assert "v5p@200:kill never struck" not in report


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
