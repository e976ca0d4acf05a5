"""Bins of a run: sums are kept, whatever its length and whatever is looked at."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_jax.dashboard.timeline import Grid

BEGIN = 1_790_000_000.0
DAY_S = 86_400.0


def grid_of(bins: int = 64, width_s: float = 1.0) -> Grid:
    grid = Grid(["a", "b"], bins, width_s)
    grid.new_row()
    grid.add("a", 0, BEGIN, 0.0)
    return grid


def total(grid: Grid, field: str, start: float, stop: float, columns: int = 1) -> float:
    return float(grid.columns([field], start, stop, columns).sum())


def test_a_value_is_in_the_column_of_its_time():
    grid = grid_of()
    grid.add("a", 0, BEGIN + 3.5, 2.0)
    assert (
        grid.columns(["a"], BEGIN, BEGIN + 8, 8)[0, 0].tolist()
        == [0, 0, 0, 2] + [0] * 4
    )


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


def test_a_window_within_a_bin_has_its_share():
    grid = grid_of()
    grid.spread("a", 0, BEGIN, BEGIN + 10, 10.0)
    assert total(grid, "a", BEGIN + 2.25, BEGIN + 2.75) == pytest.approx(0.5)


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


def test_rows_keep_what_they_have_when_there_are_more():
    grid = grid_of()
    grid.add("a", 0, BEGIN + 1, 5.0)
    rows = [grid.new_row() for _ in range(70)]
    grid.add("a", rows[-1], BEGIN + 1, 7.0)
    sums = np.sum(grid.columns(["a"], BEGIN, BEGIN + 64, 4), axis=-1)[0]
    assert sums[0] == 5.0
    assert sums[rows[-1]] == 7.0
    assert sums.sum() == 12.0
