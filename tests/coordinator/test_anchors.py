"""Anchors of lost fragments: one island may send those of several at a time."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from diloco_jax.coordinator.holding.anchors import LostFragments, key_of, layouts_of
from diloco_jax.coordinator.holding.inbox import Inbox, Rooms
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.protocol.holding import AwaitAnchor, LostFragment
from diloco_jax.protocol.values import Version
from diloco_jax.wire.bulk import UploadStart
from diloco_jax.wire.errors import Busy, Refused

PLAN = plan_fragments({"x": (40,), "y": (30,)}, {"x": ("embed",), "y": ("embed",)}, 2)
FRAGMENTS = PLAN.fragments


@pytest.fixture
def lost():
    """Both fragments are lost; island a was asked for both."""
    inbox = Inbox(layouts_of(FRAGMENTS), Rooms(10_000))
    made = LostFragments(
        SimpleNamespace(plan=SimpleNamespace(fragments=FRAGMENTS)),
        SimpleNamespace(lost=set()),
        inbox,
        threading.Event(),
        submit=lambda job: None,
        tell=lambda told: None,
    )
    made.lose([LostFragment(fragment=f, why="a test") for f in range(2)])
    for fragment in range(2):
        made.expect(AwaitAnchor(fragment=fragment, island="a", incarnation=1, term=2))
    return made


def start_of(fragment: int) -> UploadStart:
    size = layouts_of(FRAGMENTS)[fragment].total_bytes
    return UploadStart(
        run_id="r",
        island="a",
        incarnation=1,
        session="s",
        fragment=fragment,
        tick=-1,
        offset=0,
        length=size,
        total=size,
        version=Version(1, 1),
    )


def send(lost: LostFragments, fragment: int) -> UploadStart:
    start = start_of(fragment)
    place = lost.begin(start)
    place[:] = np.full(start.total, fragment, np.uint8).data
    assert lost.end(start, place)
    return start


def test_another_anchor_of_the_same_island_stays(lost):
    """It was dropped with the first one that was done, and the worker failed."""
    first, second = send(lost, 0), send(lost, 1)
    lost.expect(AwaitAnchor(fragment=0, island="b", incarnation=1, term=2))
    with pytest.raises(KeyError):
        lost._inbox.payload(key_of(first))
    assert (lost._inbox.payload(key_of(second)) == 1).all()


def test_a_delta_of_a_lost_fragment_is_refused_and_an_anchor_nobody_awaits_waits(lost):
    with pytest.raises(Refused, match="fragment 1 was lost here"):
        lost.require_no_delta(1)
    lost.expect(AwaitAnchor(fragment=1, island="b", incarnation=1, term=2))
    with pytest.raises(Busy, match="come again"):
        lost.begin(start_of(1))
