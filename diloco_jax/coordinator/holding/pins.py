"""Keep anchors while islands fetch them in full.

A fetch has several stripes, which begin and break at different times, and the hosts of
an island fetch parts of one version. So an anchor is kept while a stripe is under way,
and for some seconds longer.
"""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref

import numpy as np
import numpy.typing as npt

from diloco_jax.core.fragment_merge import Arrays
from diloco_jax.core.tiles import tile_digests
from diloco_jax.protocol.values import Version

PINNED_VERSIONS = 2
"""Anchors kept per fragment for joins under way."""


@dataclasses.dataclass
class _Pin:
    anchor: Arrays
    begun: int = 0
    """Stripes whose fetch began."""
    newest: float = 0.0
    """Time at which the newest of them began."""
    ended: list[float] = dataclasses.field(default_factory=list)
    """Times at which they ended. To append one takes no lock: the garbage collector may
    do it at any moment."""
    _digests: list[npt.NDArray[np.uint8]] | None = None
    _computing: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def holds(self, now: float, pin_s: float) -> bool:
        """Tell if a stripe is under way, or was within the last `pin_s`."""
        last = max([self.newest, *self.ended[-1:]])
        return len(self.ended) < self.begun or now <= last + pin_s

    def digests(self) -> list[npt.NDArray[np.uint8]]:
        """Return the digests of the anchor's tiles by piece, uint8[tiles, 32]. They are
        computed once, however many islands join at a time."""
        with self._computing:
            if self._digests is None:
                self._digests = [tile_digests(np.asarray(a)) for a in self.anchor]
            return self._digests

    def end(self) -> None:
        """Note that a stripe ended."""
        self.ended.append(time.monotonic())


class Pins:
    """The anchors of one fragment that islands are fetching. The caller holds the
    store's lock.
    """

    def __init__(self, pin_s: float) -> None:
        """pin_s: seconds for which an anchor is kept once no stripe is under way."""
        self._pin_s = pin_s
        self._pins: dict[Version, _Pin] = {}

    def begin(self, version: Version, current: Arrays | None) -> _Pin | None:
        """Keep the anchor of this version for one more stripe; return None if it is
        gone.

        current: the anchor's arrays if `version` is the fragment's current one, else
        None.
        """
        self.expire()
        if current is not None:
            self._pins.setdefault(version, _Pin(current))
        pin = self._pins.get(version)
        if pin is not None:
            pin.begun, pin.newest = pin.begun + 1, time.monotonic()
            while len(self._pins) > PINNED_VERSIONS:
                del self._pins[min(self._pins)]
        return pin

    def expire(self) -> None:
        """Free the anchors that no island is fetching any more."""
        now = time.monotonic()
        self._pins = {v: p for v, p in self._pins.items() if p.holds(now, self._pin_s)}


def watch(pin: _Pin, source: object) -> None:
    """Count a stripe of the pin as ended once nothing holds `source` any more."""
    weakref.finalize(source, pin.end).atexit = False
