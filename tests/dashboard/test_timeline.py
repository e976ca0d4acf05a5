"""Islands over time, by the lines of a tape; in bins, sums are kept, whatever the run's
length and whatever is looked at."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import BEGIN, made

from diloco_jax.coordinator import journal
from diloco_jax.dashboard.timeline import STATES, Grid, Timeline, count_of
from diloco_jax.protocol import records
from diloco_jax.protocol.messages import Contribution, Record, Version

OF_A = {"island": "a", "incarnation": 1}


class Told:
    """A timeline to which a test tells records, at seconds after the beginning."""

    def __init__(self) -> None:
        self.timeline, self.seq = Timeline(), 0
        self.tape(0.0, made(journal.Begun))

    def tape(self, time: float, record: records.Written) -> None:
        self.timeline.tape({**records.line(record), "time": BEGIN + time})

    def join(self, time: float, name: str = "a", incarnation: int = 1) -> None:
        who = {"island": name, "incarnation": incarnation}
        self.tape(time, made(records.Joined, tokens_per_step=100, **who))

    def left(self, time: float, reason, incarnation: int = 1) -> None:
        facts = {"island": "a", "incarnation": incarnation, "reason": reason}
        lost = (100, 300)
        left = made(records.Left, steps=3, lost_tokens_by_fragment=lost, **facts)
        self.tape(time, left)

    def took(self, time: float, fragment: int = 0, tick: int = 1) -> None:
        self.fact(time, kind="took", fragment=fragment, tick=tick)

    def adopted(self, time: float, version: int, fragment: int = 0) -> None:
        at = Version(1, version)
        self.fact(time, kind="adopted", fragment=fragment, version=at)

    def fact(self, time: float, **fields) -> None:
        self.seq += 1
        record = Record(seq=self.seq, step=1, **fields)
        self.tape(time, records.Fact(record=record, **OF_A))

    def merged(
        self,
        time: float,
        version: int = 1,
        base: int = 0,
        island: str = "a",
        **verdicts,
    ) -> None:
        facts = {"island": island, "incarnation": 1, "tokens": 400}
        part = made(Contribution, base=Version(1, base), **facts)
        merged = made(
            records.Merged,
            version=Version(1, version),
            contributions=(part,),
            share=0.5,
            verdicts=verdicts,
        )
        self.tape(time, merged)

    def metrics(self, time: float, step: int, phase="training", **more) -> None:
        line = {"kind": "island", "time": BEGIN + time, "island": "a", "phase": phase}
        line |= {"step": step, "loss": 2.0, "eval_loss": None}
        line |= {"median_step_seconds": 1.0, "stalled_seconds": 0.0}
        line |= {"bytes_up": 0, "bytes_down": 0, **more}
        self.timeline.metrics(line)

    def seconds(self, start: float, stop: float, name: str = "a") -> dict[str, float]:
        """Seconds in each state, without zeros."""
        self.timeline.settle()
        lane = self.timeline.lanes.get(name, self.timeline.coordinator)
        at = (BEGIN + start, BEGIN + stop, 1)
        found = self.timeline.grid.columns(STATES, *at)[:, lane.row, 0]
        named = zip(STATES, found, strict=True)
        return {s: round(float(v), 3) for s, v in named if v > 1e-3}

    def total(self, field: str, start: float = 0.0, stop: float = 1000.0) -> float:
        self.timeline.settle()
        at = (BEGIN + start, BEGIN + stop, 1)
        row = self.timeline.lanes["a"].row
        return float(self.timeline.grid.columns([field], *at)[0, row, 0])


@pytest.fixture
def told():
    return Told()


def test_phases_follow_each_other(told):
    told.join(2.0)
    told.metrics(4.0, 0, "compiling")
    told.metrics(10.0, 1)
    told.metrics(20.0, 11)
    told.left(30.0, "finished")
    told.metrics(31.0, 0, "stopped", island="b")
    assert told.seconds(0, 100) == {"joining": 2, "compiling": 6, "training": 20}


def test_an_island_that_died_is_away_until_it_comes_again(told):
    told.join(0.0)
    told.metrics(1.0, 1)
    told.tape(10.0, records.Absent(why="silent", **OF_A))
    told.left(15.0, "died")
    told.join(20.0, incarnation=2)
    told.metrics(25.0, 1)
    told.metrics(30.0, 2)
    assert told.seconds(0, 30) == {"joining": 6, "training": 14, "absent": 10}
    assert [lost[1:] for lost in told.timeline.lost] == [("died", 200)]


def test_an_island_that_trained_on_without_the_coordinator_was_not_away(told):
    told.join(0.0)
    told.metrics(0.0, 1)
    told.metrics(10.0, 10)
    told.tape(30.0, recovered(10.0))
    told.tape(31.0, records.Resumed(steps=30, **OF_A))
    told.metrics(40.0, 40)
    assert told.seconds(0, 40) == {"training": 40}
    assert told.seconds(0, 40, "coordinator") == {"training": 20, "absent": 20}


def test_an_island_that_ended_with_the_coordinator_was_away(told):
    told.join(0.0)
    told.metrics(0.0, 1)
    told.metrics(10.0, 10)
    told.tape(30.0, recovered(10.0))
    told.left(31.0, "stopped")
    told.join(35.0, incarnation=2)
    told.metrics(36.0, 0, "compiling")
    told.metrics(40.0, 1)
    assert told.seconds(0, 40) == {
        "training": 10,
        "absent": 21,
        "joining": 1,
        "compiling": 4,
    }


def recovered(since: float) -> journal.Recovered:
    return made(journal.Recovered, since=BEGIN + since)


def test_a_delta_is_out_from_its_take_to_its_verdict(told):
    told.join(0.0)
    told.took(10.0)
    told.took(12.0, fragment=1)
    told.merged(15.0, a=(1, "merged", ""))
    told.merged(20.0, version=2, a=(1, "pending", ""))
    assert told.total("out", 0, 100) == pytest.approx(10)
    told.tape(30.0, records.DeltaRefused(fragment=1, tick=1, reason="stale", **OF_A))
    told.metrics(90.0, 1)
    assert told.total("out", 0, 100) == pytest.approx(20)


def test_a_take_that_is_told_again_is_not_out_again(told):
    told.join(0.0)
    told.took(10.0)
    told.merged(15.0, a=(1, "merged", ""))
    told.seq -= 1
    told.took(20.0)
    told.metrics(90.0, 1)
    assert told.total("out", 0, 100) == pytest.approx(5)


def test_tokens_and_bytes_are_spread_between_two_reports(told):
    told.join(0.0)
    told.metrics(10.0, 0)
    told.metrics(20.0, 10, bytes_up=500)
    assert told.total("tokens", 10, 15) == pytest.approx(500)
    assert told.total("bytes_up", 10, 20) == pytest.approx(500)
    told.join(30.0, incarnation=2)
    told.metrics(31.0, 2, bytes_up=70)
    assert told.total("tokens") == pytest.approx(1200)
    assert told.total("bytes_up") == pytest.approx(570)


def test_how_far_an_island_is_behind(told):
    told.join(0.0)
    told.merged(1.0, version=1)
    told.adopted(2.0, 1)
    told.merged(3.0, version=4)
    told.metrics(4.0, 1)
    assert told.total("lag") / told.total(count_of("lag")) == 3


def test_a_merge_says_who_took_part_and_whose_base_was_old(told):
    told.join(0.0)
    told.merged(5.0, version=3, base=0)
    line = {"kind": "merge", "time": BEGIN + 5.1, "fragment": 0, "version": 3}
    line |= {"pairwise_cosine": 0.5, "cosine_to_last": None, "norm": 1.0}
    told.timeline.metrics({**line, "seconds": 0.25})
    (merge,) = told.timeline.merges
    assert (merge["tokens"], merge["stale"], merge["share"]) == (
        *({"a": 400}, {"a": 2}, 0.5),
    )
    assert merge["pairwise_cosine"] == 0.5
    assert told.total("merged_tokens") == 400


def test_what_an_older_incarnation_says_late_is_not_the_new_ones(told):
    told.join(0.0)
    told.join(10.0, incarnation=2)
    told.took(11.0)
    told.left(12.0, "died")
    told.metrics(20.0, 1)
    assert told.total("out") == 0
    assert told.seconds(0, 20) == {"joining": 20}


def test_events_have_whole_sentences(told):
    told.join(1.0)
    told.left(2.0, "died")
    told.tape(3.0, journal.Alert(text="something"))
    assert [event.text for event in told.timeline.events][1:] == [
        "a #1 joins with 100 tokens a step",
        "a #1 ended after 3 steps: died; 200 tokens are lost",
        "something",
    ]
    assert told.timeline.alerts[0][1] == "something"


DAY_S = 86_400.0


def grid_of(bins: int = 64, width_s: float = 1.0) -> Grid:
    grid = Grid(["a", "b"], bins, width_s)
    grid.new_row()
    grid.add("a", 0, BEGIN, 0.0)
    return grid


def total(grid: Grid, field: str, start: float, stop: float, columns: int = 1) -> float:
    return float(grid.columns([field], start, stop, columns).sum())


def test_a_spread_value_is_in_proportion():
    grid = grid_of()
    grid.spread("a", 0, BEGIN + 1.5, BEGIN + 4.0, 10.0)
    found = grid.columns(["a"], BEGIN, BEGIN + 5, 5)[0, 0]
    assert found == pytest.approx([0, 2, 4, 4, 0])


def test_bins_become_longer_and_no_sum_is_lost():
    grid = grid_of(bins=64)
    room = grid._sums.nbytes
    for hour in range(24 * 30):
        grid.add("a", 0, BEGIN + 3600.0 * hour, 1.0)
        grid.spread("b", 0, BEGIN + 3600.0 * hour, BEGIN + 3600.0 * (hour + 1), 3600.0)
    assert grid._sums.nbytes == room
    assert grid.width_s == 65536.0
    assert total(grid, "a", BEGIN, BEGIN + 40 * DAY_S) == 24 * 30
    assert total(grid, "b", BEGIN, BEGIN + 40 * DAY_S) == pytest.approx(30 * DAY_S)


@given(
    st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), max_size=20),
    st.integers(1, 50),
)
def test_columns_add_up_to_what_was_spread(spans, columns):
    grid = grid_of(bins=32)
    for start, stop in spans:
        grid.spread("a", 0, BEGIN + start, BEGIN + stop, stop - start)
    wanted = sum(max(0.0, stop - start) for start, stop in spans)
    found = total(grid, "a", BEGIN - 10, BEGIN + 1000, columns)
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-3)


def test_a_window_outside_is_empty():
    grid = grid_of()
    grid.spread("a", 0, BEGIN, BEGIN + 10, 10.0)
    assert total(grid, "a", BEGIN - 100, BEGIN - 50, 7) == 0
    assert total(grid, "a", BEGIN + 1000, BEGIN + 2000, 7) == 0
    assert Grid(["a"]).columns(["a"], 0.0, 1.0, 5).shape == (1, 0, 5)


def test_totals_are_those_of_one_column():
    grid = grid_of()
    grid.spread("a", 0, BEGIN, BEGIN + 10, 10.0)
    for start, stop in [(2.25, 2.75), (2.5, 7.25), (-5, 100), (50, 60), (-9, -1)]:
        found = grid.totals(["a", "b"], BEGIN + start, BEGIN + stop)
        assert found.shape == (2, 1)
        wanted = total(grid, "a", BEGIN + start, BEGIN + stop)
        assert found[0, 0] == pytest.approx(wanted)
        assert found[1, 0] == 0
    assert Grid(["a"]).totals(["a"], 0.0, 1.0).shape == (1, 0)
