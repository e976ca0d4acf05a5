"""The end of a run has as many fragments open at once as there is room for."""

from typing import Any

import pytest
from ending_support import stop, stopping
from kit import Driver, of, only, persisted

from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.holding import Merge


def crowded(at_once: int, fragments: int = 4, **changes: Any) -> Driver:
    """A flush of two islands; memory has room for the deltas of few fragments."""
    d = stopping(
        "a",
        "b",
        fragment_sizes=(4,) * fragments,
        room_each=10,
        merge_buffer_bytes=20 * at_once + 19,
        **changes,
    )
    stop(d, "a", "b")
    return d


def opened(d: Driver) -> list[int]:
    return [f.index for f in d.state.fragments if f.phase != "idle"]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 9])
def test_the_flush_opens_what_memory_has_room_for(at_once: int) -> None:
    assert opened(crowded(at_once)) == [0, 1, 2, 3][:at_once]


def test_the_next_fragment_is_opened_once_one_is_merged() -> None:
    d = crowded(1)
    for index in range(4):
        assert opened(d) == list(range(index + 1))
        d.take("a", index, 10)
        only(d.take("b", index, 10), Merge)
        assert opened(d) == list(range(index + 1)), "its deltas are still there"
        effects = d.computed(index)
    assert persisted(effects, "finished")
    assert d.totals("a").lost == d.totals("b").lost == {}


def test_islands_that_are_away_need_no_room() -> None:
    d = stopping("a", "b", fragment_sizes=(4,) * 3, room_each=10, merge_buffer_bytes=20)
    d.goodbye("b")
    stop(d, "a")
    assert opened(d) == [0, 1]


def test_every_worker_has_its_own_room() -> None:
    d = crowded(1, workers=2)
    assert opened(d) == [0, 1]
    d.take("a", 0, 10)
    d.take("b", 0, 10)
    d.computed(0)
    assert opened(d) == [0, 1, 2]


def test_an_island_that_hangs_keeps_no_fragment_from_the_others() -> None:
    """Half of the flush's 50 s, for four fragments."""
    d = crowded(1)
    for index in range(4):
        d.take("a", index, 10)
        assert opened(d) == list(range(index + 1))
        if index < 3:
            due = decide.next_deadline(d.state, d.now)
            assert due == d.now + 50 / 2 / 4
            d.wait(due - d.now - 0.001)
            assert opened(d) == list(range(index + 1))
            d.wait(0.001)
    assert [m.fragment for m in of(d.wait(d.config.flush_s), Merge)] == [0, 1, 2, 3]


def test_no_more_is_opened_while_deltas_come() -> None:
    d = crowded(2, fragments=8)
    for index in (0, 1):
        d.wait(5)
        d.take("a", index, 10)
    assert opened(d) == [0, 1]
    d.wait(6.25)
    assert opened(d) == [0, 1, 2]
    d.wait(1)
    assert opened(d) == [0, 1, 2], "each of them has its time"


def test_after_the_deadline_no_fragment_waits_for_room() -> None:
    d = stopping(
        "a",
        "b",
        fragment_sizes=(4, 4),
        room_each=10,
        merge_buffer_bytes=20,
        steps=10,
    )
    stop(d, "a", "b")
    assert opened(d) == [0]
    d.now += d.config.flush_s
    d.wait(0)
    assert [f.phase for f in d.state.fragments] == ["done", "done"]
