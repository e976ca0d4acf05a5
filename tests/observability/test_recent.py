"""The goodput of the last hour, however long the run is."""

from __future__ import annotations

import pytest

from diloco_jax.observability.measures import SAMPLE_S, WINDOW_S, RecentGoodput


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
