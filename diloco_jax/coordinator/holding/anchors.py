"""Islands' anchors as they arrive: for a lost state, or for fragments that a holder has
lost.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgspec

from diloco_jax.coordinator.holding.fragment_snapshots import Saver
from diloco_jax.coordinator.holding.inbox import Inbox
from diloco_jax.coordinator.holding.store import Store
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import Piece, digest_arrays
from diloco_jax.core.payload import Buffer, PayloadLayout
from diloco_jax.machine import give_memory_back
from diloco_jax.protocol.holding import (
    AnchorKept,
    AwaitAnchor,
    HolderTroubled,
    LostFragment,
)
from diloco_jax.protocol.values import DeltaKey, Version
from diloco_jax.wire import bulk
from diloco_jax.wire.errors import Busy, Refused

logger = logging.getLogger(__name__)

WRITE_AGAIN_S = 2.0
"""Pause before what could not be written is tried again, in seconds."""
CODEC = "f32"
"""Anchors travel as they are."""


def layouts_of(fragments: Sequence[Sequence[Piece]]) -> list[PayloadLayout]:
    """Return the layout of the anchor of each fragment."""
    return [PayloadLayout.of(get_codec(CODEC), pieces) for pieces in fragments]


def values_of(layout: PayloadLayout, payload: Buffer) -> list[jax.Array]:
    """Return the values of an anchor, f32[shape] by piece."""
    codec, encoded = get_codec(CODEC), layout.unpack(payload)
    return [
        codec.decode(array, placed.piece.shape)
        for placed, array in zip(layout.placed, encoded, strict=True)
    ]


def keyed(start: bulk.UploadStart) -> bulk.UploadStart:
    """Use the version as the tick, so that anchors of two versions are kept apart."""
    assert start.version is not None
    return msgspec.structs.replace(start, tick=start.version.number)


def key_of(start: bulk.UploadStart) -> DeltaKey:
    """Return the key of an anchor in an inbox."""
    tick = keyed(start).tick
    return DeltaKey(start.island, start.incarnation, start.fragment, tick)


class LostFragments:
    """The fragments that a holder has lost, until anchors take their places.

    Thread-safe: messages come from one thread, islands' bytes from many.
    """

    def __init__(
        self,
        store: Store,
        saver: Saver,
        deltas: Inbox,
        closing: threading.Event,
        submit: Callable[[Callable[[], None]], None],
        tell: Callable[[AnchorKept | HolderTroubled], None],
    ) -> None:
        """saver: knows which are lost. deltas: an inbox for the same place. closing:
        set at the end. submit: has a function called on a thread for long work."""
        self._store, self._saver, self._deltas = store, saver, deltas
        self._closing = closing
        self._submit, self._tell = submit, tell
        self._awaited: dict[int, AwaitAnchor] = {}
        self._begun: dict[int, set[DeltaKey]] = {}
        """Anchors in the inbox, by fragment: one island may send those of several."""
        self._begins = threading.Lock()
        self._prepared: dict[int, tuple[Version, dict[str, list[Any]]]] = {}
        self._keeping = threading.Lock()

    @functools.cached_property
    def _layouts(self) -> list[PayloadLayout]:
        return layouts_of(self._store.plan.fragments)

    @functools.cached_property
    def _inbox(self) -> Inbox:
        return self._deltas.beside(self._layouts)

    # ---- what the lead says ---------------------------------------------------------

    def lose(self, fragments: Sequence[LostFragment]) -> None:
        """Note that these fragments are lost."""
        for lost in fragments:
            logger.error("fragment %d is lost here: %s", lost.fragment, lost.why)
            self._saver.lost.add(lost.fragment)

    def expect(self, awaited: AwaitAnchor) -> None:
        """Await the anchor of one island for a lost fragment, and no other."""
        self._drop(awaited.fragment)
        assert self._inbox is not None  # Made on this thread, before bytes come.
        self._awaited[awaited.fragment] = awaited

    def commit(self, fragment: int) -> None:
        """Make the prepared anchor visible: the fragment is not lost any more."""
        version, arrays = self._prepared.pop(fragment)
        self._store.load(fragment, arrays, version)
        self._drop(fragment)
        self._saver.lost.discard(fragment)

    # ---- islands' bytes -------------------------------------------------------------

    def require_here(self, fragment: int) -> None:
        """Raise Busy for a fragment that is lost."""
        if fragment in self._saver.lost:
            raise Busy(
                f"fragment {fragment} was lost here, and is gathered from islands; "
                f"come again"
            )

    def require_no_delta(self, fragment: int) -> None:
        """Raise Refused for a fragment that is lost. No delta that islands have now can
        enter its next term, and anchors must not wait for them."""
        if fragment in self._saver.lost:
            raise Refused(
                "lost",
                f"fragment {fragment} was lost here, and begins a new term; the "
                f"coordinator asks for deltas in that term",
            )

    def term_of(self, start: bulk.UploadStart) -> int:
        """Return the term that the awaited anchor of a fragment begins.

        Raises Busy for another island's while the fragment is lost: the lead may be
        about to ask for it. Raises Refused otherwise."""
        awaited = self._awaited.get(start.fragment)
        if awaited is not None and (awaited.island, awaited.incarnation) == (
            start.island,
            start.incarnation,
        ):
            return awaited.term
        self.require_here(start.fragment)
        raise Refused(
            "anchor", f"nobody asked for the anchor of fragment {start.fragment}"
        )

    def begin(self, start: bulk.UploadStart) -> memoryview:
        """Return the place of a stripe of an awaited anchor; see `Inbox.begin`."""
        self.term_of(start)
        with self._begins:
            self._begun.setdefault(start.fragment, set()).add(key_of(start))
        return self._inbox.begin(keyed(start))

    def end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        """Accept a stripe in its place; keep the anchor after the last one."""
        if not self._inbox.end(keyed(start), place):
            return False
        awaited = self._awaited.get(start.fragment)
        if awaited is not None:
            self._submit(lambda: self._keep_one(awaited, start))
        return True

    def _keep_one(self, awaited: AwaitAnchor, start: bulk.UploadStart) -> None:
        # One after the other: that which is awaited last is written last.
        with self._keeping:
            self._keep(awaited, start)

    def _keep(self, awaited: AwaitAnchor, start: bulk.UploadStart) -> None:
        """Write the anchor as the first snapshot of the fragment's new term."""
        fragment = awaited.fragment
        if self._awaited.get(fragment) is not awaited:
            return  # Another island was asked meanwhile.
        assert start.version is not None
        payload = self._inbox.payload(key_of(start))
        values = values_of(self._layouts[fragment], payload.data)
        arrays = self._store.first(fragment, values)
        version = Version(awaited.term, start.version.number)
        told = False
        while True:
            try:
                self._saver.begin_fragment(fragment, version, arrays)
                break
            except OSError as error:
                if not told:
                    text = (
                        f"the anchor of lost fragment {fragment} is not kept: {error}"
                    )
                    self._tell(HolderTroubled(text=f"{text}; free some space there"))
                told = True
            ended = self._closing.wait(WRITE_AGAIN_S)
            if ended or self._awaited.get(fragment) is not awaited:
                return
        self._prepared[fragment] = version, arrays
        give_memory_back()
        kept = AnchorKept(
            fragment=fragment,
            island=awaited.island,
            incarnation=awaited.incarnation,
            replaced=start.version,
            version=version,
            digest=digest_arrays(arrays["theta"]),
        )
        self._tell(kept)

    def _drop(self, fragment: int) -> None:
        """Await no anchor of the fragment; free what came of it."""
        self._awaited.pop(fragment, None)
        with self._begins:
            begun = self._begun.pop(fragment, set())
        for key in begun:
            self._inbox.drop(key)
