"""Deltas are assembled in any order, bounded, and checked before allocation."""

import pytest

from diloco_jax.coordinator.inbox import DeltaKey, Inbox
from diloco_jax.wire.errors import Busy, RemoteProtocolError
from diloco_jax.wire.messages import UploadStart

KEY = DeltaKey("a", 1, 0, 7)


def start(offset=0, length=100, total=100, **other):
    fields = {"island": "a", "incarnation": 1, "fragment": 0, "tick": 7, **other}
    return UploadStart(
        run_id="r", session="s", offset=offset, length=length, total=total, **fields
    )


def put(inbox, stripe, value):
    inbox.begin(stripe)[:] = bytes([value]) * stripe.length
    return inbox.end(stripe)


@pytest.fixture
def inbox():
    return Inbox(lambda fragment: 100, capacity_bytes=250)


def test_stripes_in_any_order_make_a_delta_once(inbox):
    assert not put(inbox, start(60, 40), 2)
    with pytest.raises(KeyError):
        inbox.payload(KEY)
    assert put(inbox, start(0, 60), 1)
    assert bytes(inbox.payload(KEY)) == b"\1" * 60 + b"\2" * 40


def test_a_repeated_stripe_neither_counts_twice_nor_changes_a_complete_delta(inbox):
    assert not put(inbox, start(0, 60), 1)
    assert not put(inbox, start(0, 60), 1)
    assert put(inbox, start(60, 40), 2)
    assert not put(inbox, start(0, 60), 9)
    assert bytes(inbox.payload(KEY))[:1] == b"\1"


def test_an_announced_size_that_does_not_fit_is_refused_before_allocation(inbox):
    with pytest.raises(RemoteProtocolError, match=r"101 bytes, expected 100"):
        inbox.begin(start(total=101))
    with pytest.raises(RemoteProtocolError, match="does not fit"):
        inbox.begin(start(offset=60, length=41))


def test_outstanding_bytes_are_bounded_and_dropping_makes_room(inbox):
    put(inbox, start(tick=1), 1)
    put(inbox, start(tick=2), 1)
    with pytest.raises(Busy, match="merge_buffer_bytes = 250"):
        inbox.begin(start(tick=3))
    inbox.drop(DeltaKey("a", 1, 0, 1))
    assert put(inbox, start(tick=3), 1)


def test_a_new_incarnation_frees_what_the_old_one_sent(inbox):
    put(inbox, start(), 1)
    put(inbox, start(island="b"), 1)
    inbox.drop_island("a", before=2)
    with pytest.raises(KeyError):
        inbox.payload(KEY)
    assert inbox.payload(DeltaKey("b", 1, 0, 7)) is not None
