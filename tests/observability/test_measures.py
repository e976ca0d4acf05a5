"""The measures of a run, on numbers that can be checked by hand; the goodput of the
last hour, however long the run is; one word for a run, and what is wrong now."""

from __future__ import annotations

import math

import pytest

from diloco_jax.observability.measures import (
    SAMPLE_S,
    WINDOW_S,
    IslandMeasure,
    RecentGoodput,
    compute_goodput,
    goodput,
    health_of,
    health_text,
    participation,
    uptime,
)


def island(**fields):
    defaults = {
        "provisioned_seconds": 100.0,
        "tokens_per_step": 1000,
        "median_step_seconds": 0.5,
        "computed_tokens": 200_000,
        "merged_tokens": 200_000,
    }
    return IslandMeasure(**{**defaults, **fields})


IDLE = island(median_step_seconds=0.0, computed_tokens=0, merged_tokens=0)


@pytest.mark.parametrize(
    ("islands", "merged", "computed"),
    [
        ([island()], 1.0, 1.0),
        ([island(merged_tokens=50_000, computed_tokens=100_000)], 0.25, 0.5),
        # Islands count by what they could have done.
        (
            [
                island(),
                island(tokens_per_step=3000, computed_tokens=0, merged_tokens=0),
            ],
            *(0.25, 0.25),
        ),
        ([island(), IDLE], 1.0, 1.0),
        ([IDLE], 0.0, 0.0),
    ],
)
def test_goodput_is_a_share_of_what_undisturbed_islands_compute(
    islands, merged, computed
):
    assert goodput(islands) == pytest.approx(merged)
    assert compute_goodput(islands) == pytest.approx(computed)


def test_uptime_counts_overlaps_once_and_gaps_not():
    a = island(active=((0.0, 10.0), (40.0, 50.0)))
    b = island(active=((2.0, 4.0), (5.0, 20.0)))
    assert uptime([a, b], wall_seconds=100.0) == pytest.approx(0.3)


def test_participation_is_a_share_and_zero_of_none():
    assert participation(3, 4) == 0.75
    assert participation(0, 0) == 0.0


class Run:
    """Two islands of 100 tokens per second each."""

    def __init__(self) -> None:
        self.recent, self.now, self.merged = RecentGoodput(), 500.0, 0
        self.islands = {
            name: {"state": "training", "tokens_per_second": 100.0} for name in "ab"
        }
        self.phase = "running"
        self.look()

    def look(self) -> None:
        status = {
            "phase": self.phase,
            "tokens_merged": self.merged,
            "islands": self.islands,
        }
        self.recent.note(status, self.now)

    def go_on(self, seconds: float, merged_per_s: float) -> float:
        for _ in range(round(seconds / 10)):
            self.now += 10.0
            self.merged += round(10 * merged_per_s)
            self.look()
        return self.recent.goodput


def test_it_is_the_share_that_is_merged_in_the_window():
    run = Run()
    assert run.recent.goodput == 1.0, "nothing is known yet"
    assert run.go_on(240 * 3600.0, 180.0) == pytest.approx(0.9)
    assert run.go_on(WINDOW_S / 2, 20.0) == pytest.approx(0.5, abs=0.02)
    assert run.go_on(WINDOW_S, 20.0) == pytest.approx(0.1)
    assert WINDOW_S <= run.recent.seconds <= WINDOW_S + SAMPLE_S
    assert len(run.recent._samples) <= WINDOW_S / SAMPLE_S + 2


def test_an_absent_island_counts_with_its_last_speed_and_a_gone_one_does_not():
    run = Run()
    run.islands["b"] = {"state": "absent", "tokens_per_second": 0.0}
    assert run.go_on(2 * WINDOW_S, 100.0) == pytest.approx(0.5)
    run.islands["b"] = {"state": "gone", "tokens_per_second": 0.0}
    assert run.go_on(2 * WINDOW_S, 100.0) == pytest.approx(1.0)


@pytest.mark.parametrize("how", ["a new term", "the flush"])
def test_other_books_begin_a_window(how):
    run = Run()
    run.go_on(WINDOW_S, 20.0)
    if how == "a new term":
        run.merged = 0
    else:
        run.phase = "flushing"
    run.now += 10.0
    run.look()
    assert run.recent.seconds == 0.0
    run.phase = "running"
    assert run.go_on(WINDOW_S, 180.0) == pytest.approx(0.9)


WELL = {"state": "training", "steps": 9, "loss": 2.0}


def status(phase="running", more=None, **islands):
    found = {"phase": phase, "islands": {"a": WELL, "b": WELL, **islands}}
    return {**found, **(more or {})}


def test_a_run_whose_islands_train_is_healthy():
    assert health_of(status()) == {"state": "healthy", "why": []}
    starting = {"state": "compiling", "steps": 0, "loss": None}
    assert health_of(status(c=starting))["state"] == "healthy"
    # The loss of the first step is read after the second one is launched.
    first = {"state": "training", "steps": 1, "loss": None}
    assert health_of(status(c=first))["state"] == "healthy"


@pytest.mark.parametrize("state", ["compiling", "joining"])
def test_a_run_is_starting_until_an_island_trains(state):
    waits = {"state": state, "steps": 0, "loss": None}
    found = {"phase": "running", "islands": {"a": waits, "b": waits}}
    assert health_of(found) == {"state": "starting", "why": []}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (status(c={"state": "absent"}), "c absent"),
        (status(c={**WELL, "state": "quarantined"}), "c quarantined"),
        (status(c={**WELL, "loss": math.nan}), "c without a finite loss"),
        (status(c={"state": "gone"}), "c gone"),
        (status(more={"wrong": ["b makes no step"]}), "b makes no step"),
        (status("gathering"), "the coordinator has lost its state"),
    ],
    ids=str,
)
def test_it_is_degraded_with_the_reason(given, why):
    found = health_of(given)
    assert found["state"] == "degraded"
    assert found["why"][0].startswith(why)
    assert health_text(found).startswith(f"degraded: {why}")


@pytest.mark.parametrize(
    ("given", "state"),
    [
        ({"unreachable": "nobody answers"}, "down"),
        ({"phase": "unreachable", "islands": {}}, "down"),
        ({"phase": "running", "islands": {"a": {"state": "absent"}}}, "down"),
        ({"phase": "starting", "islands": {}}, "starting"),
        ({"phase": "running", "islands": {"a": {"state": "starting"}}}, "starting"),
        ({"phase": "done", "islands": {"a": {}}}, "done"),
        ({"phase": "ending", "islands": {"a": {}}}, "ending"),
        ({"phase": "evaluating", "islands": {"a": {}}}, "evaluating"),
        ({"phase": "stopped", "islands": {"a": {}}}, "stopped"),
    ],
    ids=str,
)
def test_one_word_says_the_rest(given, state):
    assert health_of(given)["state"] == state


def test_islands_that_left_at_the_end_are_not_missed():
    ends = status("flushing", a={"state": "gone"}, b={"state": "stopped"})
    assert health_of(ends) == {"state": "healthy", "why": []}


def test_many_troubles_are_counted():
    away = {f"i{n}": {"state": "absent"} for n in range(7)}
    assert "i0, i1, i2, i3 and 3 more absent" in health_text(health_of(status(**away)))
    wrong = [f"{n} is wrong" for n in range(6)]
    text = health_text(health_of(status(more={"wrong": wrong})))
    assert text.endswith("3 is wrong; and 2 more")
