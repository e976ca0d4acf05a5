"""Islands' anchors as they arrive for fragments that a holder does not have: after it
has lost them, after the coordinator has lost the run, or before a run begins.

One island is awaited for the anchor of a fragment. Then others may be for their
ballots, which are compared with that anchor (`protocol/coordinator/anchors.py`).
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from diloco_jax.coordinator.holding.fragment_snapshots import (
    FragmentSnapshots,
    Publishes,
    repeat,
)
from diloco_jax.coordinator.holding.inbox import Inbox, Rooms
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import Buffer, PayloadLayout, Piece
from diloco_jax.core.tiles import (
    ballot_of,
    compare_ballots,
    digest_arrays,
    sha256_arrays,
)
from diloco_jax.machine import give_memory_back
from diloco_jax.protocol.holding import (
    AnchorCompared,
    AnchorKept,
    AwaitAnchor,
    HolderTroubled,
    LostFragment,
)
from diloco_jax.protocol.messages import DeltaKey, Version
from diloco_jax.wire import bulk
from diloco_jax.wire.errors import Refused

logger = logging.getLogger(__name__)

CODEC = "f32"
"""Anchors travel as they are."""


def layouts_of(fragments: Sequence[Sequence[Piece]]) -> list[PayloadLayout]:
    """Return the layout of the anchor of each fragment."""
    return [PayloadLayout.of(get_codec(CODEC), pieces) for pieces in fragments]


def values_of(layout: PayloadLayout, payload: Buffer) -> list[npt.NDArray[Any]]:
    """Return the values of an anchor, f32[shape] by piece, bit for bit: the codec,
    which is for changes, would make zeros of subnormals and of -0.0."""
    return [
        placed.piece.grid.join(octets.view("<f4"))
        for placed, octets in zip(layout.placed, layout.unpack(payload), strict=True)
    ]


class _Arriving:
    """An anchor, or a ballot, awaited of one island, with its parts that have come at
    one version."""

    def __init__(
        self, awaited: AwaitAnchor, layouts: Sequence[PayloadLayout], rooms: Rooms
    ) -> None:
        self.awaited, self._layouts, self._rooms = awaited, layouts, rooms
        self.complete = False
        """All of it has come: what is checked now stays as it is."""
        self.version: Version | None = None
        self.clear()

    def clear(self) -> None:
        """Free the bytes that have come."""
        self.inbox = Inbox(self._layouts, self._rooms)

    def payload(self, start: bulk.UploadStart) -> Buffer:
        """Return the bytes that have arrived."""
        key = DeltaKey(start.island, start.incarnation, start.fragment, start.tick)
        return self.inbox.payload(key).data


class LostFragments:
    """The fragments that a holder does not have, until anchors take their places.

    Thread-safe: messages come from one thread, islands' bytes from many.
    """

    def __init__(
        self,
        store: Store,
        snapshots: FragmentSnapshots,
        publishes: Publishes,
        rooms: Rooms,
        closing: threading.Event,
        submit: Callable[[Callable[[], None]], None],
        tell: Callable[[AnchorKept | AnchorCompared | HolderTroubled], None],
    ) -> None:
        """snapshots: knows which are lost. rooms: those of deltas. closing: set at the
        end. submit: has a function called on a thread for long work."""
        self._store, self._snapshots, self._publishes = store, snapshots, publishes
        self._lost, self._rooms = snapshots.lost, rooms
        self._closing, self._submit, self._tell = closing, submit, tell
        self._arriving: dict[tuple[int, str], _Arriving] = {}
        """By fragment and island."""
        self._begins, self._keeping = threading.Lock(), threading.Lock()
        self._prepared: dict[int, tuple[Version, dict[str, list[Any]]]] = {}

    @functools.cached_property
    def _layouts(self) -> list[PayloadLayout]:
        return layouts_of(self._store.plan.fragments)

    @functools.cached_property
    def _ballots(self) -> list[PayloadLayout]:
        return [PayloadLayout.of_ballots(f) for f in self._store.plan.fragments]

    # ---- what the lead says ---------------------------------------------------------

    def lose(self, fragments: Sequence[LostFragment]) -> None:
        """Note that these fragments are lost."""
        for lost in fragments:
            if lost.why:
                logger.error("fragment %d is lost here: %s", lost.fragment, lost.why)
            self._lost.add(lost.fragment)

    def expect(self, awaited: AwaitAnchor) -> None:
        """Await the anchor of one island for a lost fragment, and no other; or the
        ballot of one about the anchor that is here."""
        if not awaited.sample:
            self._drop(awaited.fragment)
            self._prepared.pop(awaited.fragment, None)
        layouts = self._ballots if awaited.sample else self._layouts
        arriving = _Arriving(awaited, layouts, self._rooms)
        with self._begins:
            self._arriving[awaited.fragment, awaited.island] = arriving

    def commit(self, fragment: int) -> None:
        """Make the prepared anchor visible: the fragment is not lost any more."""
        version, arrays = self._prepared.pop(fragment)
        self._store.load(fragment, arrays, version)
        self._drop(fragment)
        self._lost.discard(fragment)
        if not self._lost:  # No delta has the size of an anchor.
            self._submit(self._rooms.free)

    def _drop(self, fragment: int) -> None:
        """Await no anchor of the fragment; free what came of it."""
        with self._begins:
            for key in [key for key in self._arriving if key[0] == fragment]:
                del self._arriving[key]

    # ---- islands' bytes -------------------------------------------------------------

    def begin(self, start: bulk.UploadStart) -> memoryview:
        """Return the place of a stripe of an awaited anchor; see `Inbox.begin`. One at
        another version begins anew, but not once all of it is here: it is checked, and
        what counts is what was checked."""
        arriving = self._of(start)
        with self._begins:
            if arriving.complete:
                raise Refused(
                    "anchor",
                    f"what island {start.island!r} sent of fragment {start.fragment} "
                    f"at {arriving.version} is here, and is not replaced",
                )
            if arriving.version != start.version:
                arriving.version = start.version
                arriving.clear()
            inbox = arriving.inbox
        return inbox.begin(start)

    def end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Accept a stripe in its place; after the last one keep the anchor, or compare
        the ballot."""
        with self._begins:
            arriving = self._arriving.get((start.fragment, start.island))
            if arriving is None or arriving.version != start.version:
                return False
            inbox = arriving.inbox
        if not inbox.end(start, place):
            return False
        with self._begins:
            # It may come twice at once, by another tick.
            if arriving.complete or arriving.inbox is not inbox:
                return False
            arriving.complete = True
        self._submit(lambda: self._use(arriving, start))
        return True

    def _of(self, start: bulk.UploadStart) -> _Arriving:
        """Return the awaited anchor. Raises Busy for another island's while the
        fragment is lost: the lead may be about to ask for it; else Refused."""
        found = self._arriving.get((start.fragment, start.island))
        if found is not None:
            asked = found.awaited
            if (asked.incarnation, asked.sample) == (start.incarnation, start.sample):
                return found
        self._snapshots.require_here(start.fragment)
        raise Refused(
            "anchor", f"nobody asked for the anchor of fragment {start.fragment}"
        )

    def _use(self, arriving: _Arriving, start: bulk.UploadStart) -> None:
        """Keep an anchor that has come, or compare a ballot."""
        # One after the other: that which is awaited last is written last.
        with self._keeping:
            if not self._is_awaited(arriving):
                return
            act = self._compared if start.sample else self._kept
            told = act(arriving, arriving.payload(start))
            arriving.clear()
            give_memory_back()
            if told is not None:
                self._tell(told)

    def _is_awaited(self, arriving: _Arriving) -> bool:
        awaited = arriving.awaited
        return self._arriving.get((awaited.fragment, awaited.island)) is arriving

    def _kept(self, arriving: _Arriving, payload: Buffer) -> AnchorKept | None:
        """Write the anchor as the first snapshot of the fragment's new term, unless it
        is not finite; None: it is not awaited any more."""
        awaited, replaced = arriving.awaited, arriving.version
        assert replaced is not None
        fragment = awaited.fragment
        values = values_of(self._layouts[fragment], payload)
        fit = all(bool(np.isfinite(value).all()) for value in values)
        version = Version(awaited.term, replaced.number)
        digest = parameters = ""
        if fit:
            arrays = self._store.first(fragment, values)
            digest = sha256_arrays(arrays["anchor"])
            parameters = digest_arrays(arrays["anchor"])
            if not self._write(arriving, version, arrays):
                return None
            self._prepared[fragment] = version, arrays
        return AnchorKept(
            fragment=fragment,
            island=awaited.island,
            incarnation=awaited.incarnation,
            replaced=replaced,
            version=version,
            digest=digest,
            parameters=parameters,
            unfit=not fit,
        )

    def _write(
        self, arriving: _Arriving, version: Version, arrays: dict[str, list[Any]]
    ) -> bool:
        """Write an anchor, however often that takes; return False once it is not
        awaited any more."""
        fragment = arriving.awaited.fragment

        def write() -> bool:
            self._snapshots.begin(fragment, version, arrays, self._publishes)
            return True

        written = repeat(
            write,
            lambda error: (
                f"the anchor of lost fragment {fragment} is not kept: {error}; free "
                f"some space there"
            ),
            lambda pause_s: (
                self._closing.wait(pause_s) or not self._is_awaited(arriving)
            ),
            self._tell,
        )
        return written is not None

    def _compared(self, arriving: _Arriving, payload: Buffer) -> AnchorCompared | None:
        """Compare a ballot with the anchor that is here; None: another island's anchor
        is awaited meanwhile."""
        awaited, version = arriving.awaited, arriving.version
        assert version is not None
        found = self._prepared.get(awaited.fragment)
        if found is None:
            return None
        layout, anchors = self._ballots[awaited.fragment], found[1]["anchor"]
        equal, squares = True, 0.0
        for placed, theirs, anchor in zip(
            layout.placed, layout.unpack(payload), anchors, strict=True
        ):
            grid = placed.piece.grid
            tiles = anchor.reshape(*grid.grid, grid.elements)
            ours = ballot_of(tiles, awaited.sample)
            same, apart = compare_ballots(ours, theirs, grid.elements)
            equal, squares = equal and same, squares + apart
        return AnchorCompared(
            fragment=awaited.fragment,
            island=awaited.island,
            incarnation=awaited.incarnation,
            version=version,
            equal=equal,
            apart=math.sqrt(squares),
        )
