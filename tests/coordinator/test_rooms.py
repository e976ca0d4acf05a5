"""Memory for deltas is bounded, used again, and given back."""

import weakref

import numpy as np
import pytest
from inbox_support import KEY, LAYOUTS, put, start

from diloco_jax.coordinator.holding.inbox import SPAN_S, Inbox, Rooms
from diloco_jax.protocol.values import DeltaKey
from diloco_jax.wire.errors import Busy


def test_the_next_delta_has_the_memory_of_one_that_was_merged():
    """New pages cost the kernel up to as much as TLS."""
    inbox = Inbox(LAYOUTS, Rooms(1 << 20))
    places, others = set(), []
    for value in range(4):
        place = inbox.begin(start())
        places.add(np.frombuffer(place, np.uint8).ctypes.data)
        place[:] = bytes([value]) * len(place)
        assert inbox.end(start(), place)
        place.release()
        assert (inbox.payload(KEY) == value).all()
        inbox.drop(KEY)
        # What is freed goes to these.
        others += [np.empty(n, np.uint8) for n in range(50, 200) for _ in range(8)]
    assert len(places) == 1


def test_spare_memory_and_deltas_have_no_more_than_deltas_had():
    rooms = Rooms(1000)
    first = [rooms.in_memory(100, []) for _ in range(3)]
    memory = [weakref.ref(room.base) for room in first]
    first.clear()
    large = rooms.in_memory(150, [])
    assert large is not None
    assert [held() is None for held in memory] == [True, True, False], "300 at most"


def test_memory_is_freed_outside_the_locks_for_which_islands_wait():
    """The kernel takes back pages for tenths of a second per GB."""
    rooms, locked = Rooms(1 << 20), []
    inbox = Inbox(LAYOUTS, rooms)
    put(inbox, start(), 1)
    weakref.finalize(
        inbox.payload(KEY).base,
        lambda: locked.append([rooms._lock.locked(), inbox._lock.locked()]),
    )
    inbox.drop(KEY)
    whole = LAYOUTS[1].total_bytes
    put(inbox, start(fragment=1, length=whole, total=whole), 2)
    assert locked == [[False, False]]


def test_two_inboxes_have_the_memory_of_one():
    """Anchors that are gathered had as much again as the deltas beside them."""
    rooms = Rooms(250)
    deltas = Inbox(LAYOUTS, rooms)
    anchors = deltas.beside(LAYOUTS)
    put(deltas, start(), 1)
    put(anchors, start(island="b"), 2)
    with pytest.raises(Busy, match="exceed the 250 that this process has of"):
        anchors.begin(start(island="c"))
    deltas.drop(KEY)
    put(anchors, start(island="c"), 3)
    with pytest.raises(Busy):
        deltas.begin(start())
    assert rooms.memory_bytes == 200


def test_what_is_still_read_counts_after_it_was_dropped():
    inbox = Inbox(LAYOUTS, Rooms(250))
    put(inbox, start(), 1)
    merging = inbox.payload(KEY)
    inbox.drop(KEY)
    put(inbox, start(island="b"), 2)
    with pytest.raises(Busy):
        inbox.begin(start(island="c"))
    del merging
    assert put(inbox, start(island="c"), 3)


def test_memory_of_a_burst_is_given_back_within_two_spans():
    rooms, jobs = Rooms(1000), []
    inbox = Inbox(LAYOUTS, rooms)
    inbox.keep_house(0.0, jobs.append)
    inbox.keep_house(0.0, jobs.append)
    assert len(jobs) == 1, "one thread may be busy for long"
    jobs.pop()()
    for island in "abcdefgh":
        put(inbox, start(island=island), 1)
    memory = [
        weakref.ref(inbox.payload(DeltaKey(island, 1, 0, 7)).base)
        for island in "abcdefgh"
    ]
    for island in "abcdefgh":
        inbox.drop(DeltaKey(island, 1, 0, 7))
    inbox.keep_house(SPAN_S - 1, jobs.append)
    assert not jobs, "the next burst may come"
    for end in (SPAN_S, 2 * SPAN_S):
        assert sum(held() is not None for held in memory) == 8
        put(inbox, start(), 2)
        inbox.drop(KEY)
        inbox.keep_house(end, jobs.append)
        jobs.pop()()
    assert sum(held() is not None for held in memory) == 1, "as much as is in use"
    for end in (3 * SPAN_S, 4 * SPAN_S):
        inbox.keep_house(end, jobs.append)
        jobs.pop()()
    assert all(held() is None for held in memory)
