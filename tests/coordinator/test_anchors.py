"""Anchors as they arrive at a holder: kept, refused, or compared with a ballot."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from door_support import PLAN, AnchorHolder, Rooms
from inbox_support import start as stripe

from diloco_jax.coordinator.holding import anchors
from diloco_jax.coordinator.holding.anchors import layouts_of, values_of
from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.core.tiles import TileGrid, ballot_of
from diloco_jax.protocol.holding import AnchorCompared, AnchorKept, AwaitAnchor
from diloco_jax.protocol.messages import Version
from diloco_jax.wire.bulk import UploadStart
from diloco_jax.wire.errors import Busy, Refused

FRAGMENTS = PLAN.fragments
SAMPLE = 7


def test_the_values_of_an_anchor_have_its_bits():
    """Or the digest of a worker's Theta would never be that of what came from it."""
    (layout, _), rng = layouts_of(FRAGMENTS), np.random.default_rng(1)
    bits = [
        rng.choice(
            np.array([0x80000000, 1, 0x3F800000, 0xBF000000], np.uint32), p.shape
        )
        for p in FRAGMENTS[0]
    ]
    grids = [TileGrid.of(piece.shape) for piece in FRAGMENTS[0]]
    tiles = [
        np.ascontiguousarray(grid.split(array)).view(np.uint8)
        for grid, array in zip(grids, bits, strict=True)
    ]
    for value, array in zip(values_of(layout, layout.pack(tiles)), bits, strict=True):
        np.testing.assert_array_equal(np.asarray(value).view(np.uint32), array)


class Holder(AnchorHolder):
    """Both fragments are lost; island a was asked for both."""

    def __init__(self) -> None:
        super().__init__(Rooms(100_000))
        self.told: list[Any] = []
        self.answer(self.told.append, None)
        for fragment in range(2):
            self.expect(fragment, "a")

    def expect(self, fragment: int, island: str, sample: int = 0) -> None:
        self.hold(
            AwaitAnchor(
                fragment=fragment, island=island, incarnation=1, term=2, sample=sample
            )
        )

    def send(
        self, fragment: int, island: str, value: float, number: int = 1, sample: int = 0
    ) -> None:
        """Send the anchor with one value everywhere, or a ballot of it."""
        pieces = FRAGMENTS[fragment]
        grids = [TileGrid.of(piece.shape) for piece in pieces]
        tiles = [np.full((*g.grid, g.elements), value, "<f4") for g in grids]
        layout = layouts_of(FRAGMENTS)[fragment]
        encoded = [np.ascontiguousarray(each).view(np.uint8) for each in tiles]
        if sample:
            layout = PayloadLayout.of_ballots(pieces)
            encoded = [ballot_of(each, sample) for each in tiles]
        whole = layout.total_bytes
        of = {"island": island, "fragment": fragment, "tick": -1, "sample": sample}
        start = stripe(0, whole, whole, version=Version(1, number), **of)
        place = self.upload_begin(start)
        place[:] = bytes(layout.pack(encoded))
        self.upload_end(start, place)


@pytest.fixture
def holder() -> Holder:
    return Holder()


def test_one_island_may_send_those_of_several(holder: Holder) -> None:
    holder.send(0, "a", 0.5)
    holder.expect(0, "b")
    holder.send(1, "a", 0.25)
    assert [(t.fragment, t.island, t.version) for t in holder.told] == [
        (0, "a", Version(2, 1)),
        (1, "a", Version(2, 1)),
    ]
    assert holder.told[0].digest != holder.told[1].digest


@pytest.mark.parametrize("number", [3, 4])
def test_what_has_come_whole_is_not_replaced(holder: Holder, number: int) -> None:
    """It is what the others vote on, and what counts then."""
    holder.send(0, "a", 0.5, number=3)
    with pytest.raises(Refused, match="is not replaced"):
        holder.send(0, "a", 0.75, number=number)
    assert [kept.replaced.number for kept in holder.told] == [3]
    holder.expect(0, "b", SAMPLE)
    holder.send(0, "b", 0.5, sample=SAMPLE)
    assert holder.told[-1].equal
    with pytest.raises(Refused, match="is not replaced"):
        holder.send(0, "b", 0.75, sample=SAMPLE)


def test_what_comes_twice_at_once_counts_once(holder: Holder) -> None:
    """By two ticks: the second one found no bytes, which ended the coordinator."""
    jobs: list[Callable[[], None]] = []
    holder.lost._submit = jobs.append
    whole = layouts_of(FRAGMENTS)[0].total_bytes
    of = {"island": "a", "fragment": 0, "version": Version(1, 1)}
    starts = [stripe(0, whole, whole, tick=tick, **of) for tick in (0, -1)]
    for start, place in [(start, holder.upload_begin(start)) for start in starts]:
        place[:] = bytes(len(place))
        holder.upload_end(start, place)
    for job in jobs:
        job()
    assert len(holder.told) == 1


def test_memory_of_anchors_is_freed_once_no_fragment_is_lost(holder: Holder) -> None:
    """Deltas have other sizes: it would be spare for as long as the process lives."""
    holder.lost._store.load = lambda *anchor: None
    for fragment in range(2):
        holder.send(fragment, "a", 0.5)
    for fragment in range(2):
        assert holder.rooms._spares._octets
        holder.lost.commit(fragment)
    assert not holder.rooms._spares._octets


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_kept(holder: Holder, value: float) -> None:
    holder.send(0, "a", value)
    (kept,) = holder.told
    assert isinstance(kept, AnchorKept)
    assert kept.unfit
    assert not holder.lost._prepared


@pytest.mark.parametrize(
    ("value", "equal", "apart"), [(0.5, True, 0.0), (0.75, False, 0.25)]
)
def test_a_ballot_is_compared_with_the_anchor_that_is_here(
    holder: Holder, value: float, equal: bool, apart: float
) -> None:
    holder.send(0, "a", 0.5)
    holder.expect(0, "b", SAMPLE)
    holder.send(0, "b", value, sample=SAMPLE)
    elements = sum(math.prod(piece.shape) for piece in FRAGMENTS[0])
    (compared,) = (told for told in holder.told if isinstance(told, AnchorCompared))
    assert (compared.island, compared.equal) == ("b", equal)
    assert compared.apart == pytest.approx(apart * math.sqrt(elements))


def test_a_ballot_may_be_compared_while_the_anchor_is_given_up(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts for none, and nothing is said of it."""
    payload = anchors._Arriving.payload

    def given_up(arriving: Any, start: UploadStart) -> Any:
        if start.sample:
            holder.expect(0, "c")
        return payload(arriving, start)

    holder.send(0, "a", 0.5)
    holder.expect(0, "b", SAMPLE)
    monkeypatch.setattr(anchors._Arriving, "payload", given_up)
    holder.send(0, "b", 0.5, sample=SAMPLE)
    holder.send(0, "c", 0.75)
    assert [told.island for told in holder.told] == ["a", "c"]


def test_a_ballot_that_is_not_finite_is_infinitely_far(holder: Holder) -> None:
    holder.send(0, "a", 0.5)
    holder.expect(0, "b", SAMPLE)
    holder.send(0, "b", math.nan, sample=SAMPLE)
    assert math.isinf(holder.told[-1].apart)


def test_what_nobody_awaits_waits_or_is_refused(holder: Holder) -> None:
    with pytest.raises(Refused, match="fragment 1 was lost here"):
        holder.snapshots.require_no_delta(1)
    with pytest.raises(Busy, match="come again"):
        holder.send(0, "b", 0.5)
    with pytest.raises(Busy, match="come again"):
        holder.send(0, "a", 0.5, sample=SAMPLE)
