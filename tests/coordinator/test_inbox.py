"""Deltas are assembled in any order and checked before allocation; memory for them is
bounded, and used again.
"""

import concurrent.futures
import errno
import os
import shutil
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from inbox_support import KEY, LAYOUTS, layout, put, start

from diloco_jax.coordinator.holding.inbox import TOLD_S, Inbox, Rooms
from diloco_jax.core.fragments import Box, PayloadLayout
from diloco_jax.protocol.messages import DeltaKey
from diloco_jax.wire.errors import Busy, RemoteProtocolError

LATE_S = 60.0


@pytest.fixture
def inbox():
    return Inbox(LAYOUTS, Rooms(250))


def test_stripes_in_any_order_make_a_delta_once(inbox):
    """One that comes again neither counts twice nor changes what is here."""
    for _ in range(2):
        assert not put(inbox, start(60, 40), 2)
    with pytest.raises(KeyError):
        inbox.payload(KEY)
    assert put(inbox, start(0, 60), 1)
    assert not put(inbox, start(0, 60), 9)
    assert bytes(inbox.payload(KEY)) == b"\1" * 60 + b"\2" * 40


def test_stripes_that_overlap_are_refused_and_make_no_delta(inbox):
    """Whether the other one has arrived or is on its way; the rest of a place is
    whatever the memory held before."""
    place = inbox.begin(start(0, 50))
    for offset, length in ((1, 50), (49, 51), (10, 10), (0, 100)):
        with pytest.raises(RemoteProtocolError, match="overlap 0 to 50"):
            inbox.begin(start(offset, length))
    assert not inbox.end(start(0, 50), place)
    for offset, length in ((1, 50), (49, 51), (10, 10), (0, 100)):
        with pytest.raises(RemoteProtocolError, match=f"{offset} to {offset + length}"):
            inbox.begin(start(offset, length))
    with pytest.raises(KeyError):
        inbox.payload(KEY)
    assert put(inbox, start(50, 50), 2)


@pytest.mark.parametrize("stripe", [start(0, 60), start()])
def test_nothing_is_written_where_bytes_have_arrived(inbox, stripe):
    """The bytes that were checked are merged, whoever goes on sending."""
    early = inbox.begin(stripe)
    with pytest.raises(Busy, match="on their way by another connection"):
        inbox.begin(stripe)
    early[:] = bytes([1]) * stripe.length
    inbox.end(stripe, early)
    late = inbox.begin(stripe)
    late[:] = bytes([9]) * len(late)
    assert not inbox.end(stripe, late), "it is taken, and counts once"
    if stripe.length < 100:
        assert put(inbox, start(60, 40), 1)
    assert (inbox.payload(KEY) == 1).all()


def test_a_transfer_that_broke_off_leaves_its_place_to_another(inbox):
    with inbox.begin(start(0, 60)) as place:
        place[:30] = bytes(30)
    with inbox.begin(start(0, 70)):
        pass
    assert not put(inbox, start(0, 60), 1)
    assert put(inbox, start(60, 40), 1)
    assert (inbox.payload(KEY) == 1).all()


def test_what_has_arrived_needs_no_memory_to_come_again():
    (large,) = [layout((4 << 20,))]
    inbox = Inbox([large], Rooms(1 << 30))
    whole = start(0, large.total_bytes, large.total_bytes)
    assert put(inbox, whole, 1)
    assert inbox.begin(whole).nbytes == 1 << 20


def test_a_delta_does_not_come_in_countless_stripes_or_parts(monkeypatch):
    monkeypatch.setattr("diloco_jax.coordinator.holding.inbox.MOST_STRIPES", 3)
    monkeypatch.setattr("diloco_jax.coordinator.holding.inbox.MOST_PARTS", 1)
    inbox = Inbox(LAYOUTS, Rooms(1 << 20))
    for offset in range(3):
        assert not put(inbox, start(offset, 1), 1)
    assert not put(inbox, start(0, 1), 1), "it is one of these"
    with pytest.raises(RemoteProtocolError, match="in more than 3 stripes; send larg"):
        inbox.begin(start(3, 1))
    assert not put(inbox, half(LEFT), 1)
    with pytest.raises(RemoteProtocolError, match="in more than 1 parts"):
        inbox.begin(half(RIGHT))


def test_an_island_has_two_deltas_of_a_fragment_at_most():
    inbox = Inbox(LAYOUTS, Rooms(1000))
    assert put(inbox, start(incarnation=1), 1)
    assert put(inbox, start(incarnation=2), 2)
    with pytest.raises(Busy, match="2 deltas of fragment 0 of 'a' have arrived"):
        inbox.begin(start(incarnation=3))
    assert put(inbox, start(incarnation=3, island="b"), 3)
    inbox.drop(KEY)
    assert put(inbox, start(incarnation=3), 3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"total": 101}, r"101 bytes, expected 100"),
        ({"offset": 60, "length": 41}, "41 bytes at 60 does not fit"),
        ({"offset": 50, "length": 0}, "0 bytes at 50 does not fit"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_before_allocation(inbox, fields, said):
    with pytest.raises(RemoteProtocolError, match=said):
        inbox.begin(start(**fields))
    assert inbox.rooms.memory_bytes == 0


def test_memory_is_bounded_for_all_inboxes_and_what_is_read_counts(inbox):
    """Anchors that are gathered had as much again as the deltas beside them."""
    anchors = Inbox(LAYOUTS, inbox.rooms)
    put(inbox, start(), 1)
    put(anchors, start(island="b"), 2)
    with pytest.raises(Busy, match="exceed the 250 that this process has of"):
        anchors.begin(start(island="c"))
    merging = inbox.payload(KEY)
    inbox.drop(KEY)
    with pytest.raises(Busy):
        anchors.begin(start(island="c"))
    del merging
    assert put(anchors, start(island="c"), 3)
    with pytest.raises(Busy):
        inbox.begin(start())
    assert inbox.rooms.memory_bytes == 200


def test_what_is_beyond_is_on_disk_and_leaves_nothing_there(tmp_path, caplog):
    inbox = Inbox(LAYOUTS, Rooms(100, tmp_path))
    for value, island in enumerate("abc"):
        assert not put(inbox, start(0, 60, island=island), value)
        assert put(inbox, start(60, 40, island=island), value)
    for value, island in enumerate("abc"):
        assert (inbox.payload(DeltaKey(island, 1, 0, 7)) == value).all()
    assert caplog.text.count("exceed the 100 that") == 1, "told once"
    assert list(tmp_path.iterdir()) == []
    inbox.drop(DeltaKey("a", 1, 0, 7))
    assert put(inbox, start(island="d"), 4), "memory has room again"


def test_a_disk_without_room_lets_islands_come_again(tmp_path, monkeypatch):
    """What is for the log and snapshots is no room either."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    free = shutil.disk_usage(tmp_path).free
    assert put(Inbox(LAYOUTS, Rooms(0, tmp_path, spared_bytes=free // 2)), start(), 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert put(Inbox(LAYOUTS, Rooms(0, tmp_path, spared_bytes=free - 100)), start(), 1)
    with pytest.raises(Busy, match="are for the record log and snapshots"):
        Inbox(LAYOUTS, Rooms(0, tmp_path, spared_bytes=free - 99)).begin(start())
    with pytest.raises(Busy, match="are for the record log and snapshots"):
        Inbox(LAYOUTS, Rooms(0, tmp_path, spared_bytes=2 * free)).begin(start())
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Busy, match="No space left"):
        Inbox(LAYOUTS, Rooms(0, tmp_path)).begin(start())


def test_people_are_told_for_a_while_that_deltas_found_no_room(caplog):
    inbox = Inbox(LAYOUTS, Rooms(0))
    assert inbox.rooms.alerts(time.monotonic()) == []
    for _ in range(3):
        with pytest.raises(Busy):
            inbox.begin(start())
    (alert,) = inbox.rooms.alerts(time.monotonic())
    assert "exceed the 0 that this process has" in alert
    assert caplog.text.count("islands send deltas again") == 1, "told once"
    assert inbox.rooms.alerts(time.monotonic() + TOLD_S) == []


def test_a_stripe_counts_only_in_the_delta_that_it_was_written_to():
    inbox = Inbox(LAYOUTS, Rooms(350))
    for tick in range(1, 20):
        old = inbox.begin(start(0, 60, tick=tick))
        inbox.drop(DeltaKey("a", 1, 0, tick))  # Refused, say; then it is asked for.
        assert not put(inbox, start(60, 40, tick=tick), 2)
        assert not inbox.end(start(0, 60, tick=tick), old)
        with pytest.raises(KeyError):
            inbox.payload(DeltaKey("a", 1, 0, tick))
    assert put(inbox, start(0, 60, tick=tick), 1)
    assert put(inbox, start(tick=20), 1), "the rest of the others is gone"
    inbox = Inbox(LAYOUTS, Rooms(1000))
    old = inbox.begin(start())
    inbox.drop(KEY)
    new = inbox.begin(start())
    assert not inbox.end(start(), old), "its bytes are not where the new ones are"
    assert inbox.end(start(), new)
    inbox.drop(KEY)
    assert not inbox.end(start(), new), "nobody waits for it any more"
    inbox.reopen(start())


def test_what_others_have_begun_stays_as_a_delta_begins():
    inbox = Inbox(LAYOUTS, Rooms(1000))
    assert not put(inbox, start(0, 60, tick=6), 1)
    assert not put(inbox, start(0, 60, island="b", tick=6), 1)
    assert not put(inbox, start(0, 60, island="b"), 2), "its tick 6 is over"
    assert put(inbox, start(60, 40, tick=6), 1)
    assert not put(inbox, start(60, 40, island="b", tick=6), 1)


def test_the_squares_of_a_delta_are_kept_as_long_as_it_is_here():
    inbox = Inbox(LAYOUTS, Rooms(1000))
    assert put(inbox, start(), 1)
    inbox.checked(KEY, ((1.0, 2.0),))
    assert inbox.squares(KEY) == ((1.0, 2.0),)
    inbox.drop(KEY)
    inbox.checked(KEY, ((3.0,),))
    with pytest.raises(KeyError):
        inbox.squares(KEY)


def test_a_new_incarnation_frees_what_the_old_one_sent_but_did_not_leave_behind():
    inbox = Inbox(LAYOUTS, Rooms(1000))
    for value, stripe in enumerate((start(tick=1), start(tick=2), start(island="b"))):
        put(inbox, stripe, value)
    inbox.drop_island("a", before=2, kept={DeltaKey("a", 1, 0, 2)})
    with pytest.raises(KeyError):
        inbox.payload(DeltaKey("a", 1, 0, 1))
    assert (inbox.payload(DeltaKey("a", 1, 0, 2)) == 1).all()
    assert (inbox.payload(DeltaKey("b", 1, 0, 7)) == 2).all()
    inbox.drop_island("b", before=1)
    assert (inbox.payload(DeltaKey("b", 1, 0, 7)) == 2).all()


LEFT, RIGHT = (Box(0, (0, 0), (2, 1)),), (Box(0, (0, 1), (2, 2)),)


def half(part, offset=0, length=4096, **other):
    return start(offset, length, 4096, fragment=1, part=part, **other)


def test_parts_of_hosts_make_a_delta_that_takes_its_memory_once(tmp_path):
    rooms = Rooms(8192, tmp_path)
    inbox = Inbox(LAYOUTS, rooms)
    for value, part in enumerate((LEFT, RIGHT)):
        assert not put(inbox, half(part, 0, 4000), value)
    for _ in range(2):
        assert not put(inbox, half(LEFT, 4000, 96), 0), "its host may send it again"
    assert put(inbox, half(RIGHT, 4000, 96), 2)
    assert rooms.memory_bytes == 8192, "nothing is on disk"
    (tiles,) = LAYOUTS[1].unpack(inbox.payload(DeltaKey("a", 1, 1, 7)).data)
    assert rooms.memory_bytes == 0, "there was room for both nowhere else"
    assert (tiles[:, 0] == 0).all()
    assert (tiles[0, 1] == 1).all()
    assert tiles[1, 1, -1] == 2


def test_parts_without_room_to_be_joined_come_again():
    rooms = Rooms(8192 + 50)
    inbox = Inbox(LAYOUTS, rooms)
    assert not put(inbox, half(LEFT), 1)
    assert put(inbox, half(RIGHT), 2)
    with pytest.raises(Busy, match="8192 bytes more of deltas"):
        inbox.payload(DeltaKey("a", 1, 1, 7))
    inbox.reopen(half(RIGHT))
    assert rooms.memory_bytes == 4096
    assert put(inbox, half(RIGHT), 3)


def test_a_part_that_has_to_come_again_completes_the_delta_again():
    inbox = Inbox(LAYOUTS, Rooms(1 << 20))
    assert not put(inbox, half(LEFT), 1)
    assert put(inbox, half(RIGHT), 2)
    inbox.reopen(half(RIGHT))
    with pytest.raises(KeyError):
        inbox.payload(DeltaKey("a", 1, 1, 7))
    assert put(inbox, half(RIGHT), 3), "its host alone sends again"
    (tiles,) = LAYOUTS[1].unpack(inbox.payload(DeltaKey("a", 1, 1, 7)).data)
    assert [(tiles[:, n] == value).all() for n, value in ((0, 1), (1, 3))] == [True] * 2
    inbox.reopen(half(RIGHT))
    assert not put(inbox, half(LEFT), 4), "that was here"
    assert put(inbox, half(RIGHT), 5)
    assert put(inbox, start(), 1)
    inbox.reopen(start())
    assert not put(inbox, start(0, 60), 2)
    assert put(inbox, start(60, 40), 2)


def test_a_disk_that_takes_its_time_keeps_nobody_waiting(tmp_path, monkeypatch):
    inbox = Inbox(LAYOUTS, Rooms(100, tmp_path))
    assert put(inbox, start(island="b"), 1)
    allocating, go_on = threading.Event(), threading.Event()
    allocate = os.posix_fallocate

    def slowly(*arguments):
        allocating.set()
        assert go_on.wait(LATE_S)
        allocate(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", slowly)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        late = pool.submit(put, inbox, start(), 2)
        assert allocating.wait(LATE_S)
        assert inbox.payload(DeltaKey("b", 1, 0, 7)) is not None
        inbox.drop(DeltaKey("b", 1, 0, 7))
        go_on.set()
        assert late.result(LATE_S)
    assert (inbox.payload(KEY) == 2).all()


def test_parts_are_joined_without_keeping_others_waiting(monkeypatch):
    inbox, scatter = Inbox(LAYOUTS, Rooms(1 << 20)), PayloadLayout.scatter
    joining, go_on = threading.Event(), threading.Event()

    def slowly(*of):
        joining.set()
        assert go_on.wait(LATE_S)
        scatter(*of)

    monkeypatch.setattr(PayloadLayout, "scatter", slowly)
    assert not put(inbox, half(LEFT), 1)
    assert put(inbox, half(RIGHT), 2)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        late = pool.submit(inbox.payload, DeltaKey("a", 1, 1, 7))
        assert joining.wait(LATE_S)
        assert put(inbox, start(island="b"), 3)
        go_on.set()
        assert len(late.result(LATE_S)) == 8192


def test_hosts_that_send_the_same_tiles_are_refused():
    inbox = Inbox(LAYOUTS, Rooms(1 << 20))
    put(inbox, half(LEFT), 1)
    put(inbox, half(RIGHT, 0, 1), 1)
    row = (Box(0, (0, 0), (1, 2)),)
    with pytest.raises(RemoteProtocolError, match="send the same tiles"):
        inbox.begin(half(row))
    with pytest.raises(RemoteProtocolError, match="is not in a fragment of 1 pieces"):
        inbox.begin(half((Box(0, (0, 0), (3, 1)),)))


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


def test_spare_memory_and_deltas_have_no_more_than_the_limit():
    rooms = Rooms(350)
    first = [rooms.in_memory(100, []) for _ in range(3)]
    memory = [weakref.ref(room.base) for room in first]
    first.clear()
    large = rooms.in_memory(150, [])
    assert large is not None
    assert [held() is None for held in memory] == [True, False, False]


def test_memory_is_freed_outside_the_locks_for_which_islands_wait():
    """The kernel takes back pages for tenths of a second per GB."""
    whole = LAYOUTS[1].total_bytes
    rooms, locked = Rooms(whole), []
    inbox = Inbox(LAYOUTS, rooms)
    put(inbox, start(), 1)
    weakref.finalize(
        inbox.payload(KEY).base,
        lambda: locked.append([rooms._lock.locked(), inbox._lock.locked()]),
    )
    inbox.drop(KEY)
    put(inbox, start(fragment=1, length=whole, total=whole), 2)
    assert locked == [[False, False]]
