"""Substitutes for arrays: anchors as digests, local values as the steps in them.

An anchor's value is a digest over all publishes that made it. An island's local value
is the range of its own steps that have an effect in (local - base), which is the
content of its next delta (see `core.changes`). `protocol.island.boundary` must give the
same range.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from diloco_jax.coordinator.holding.store import RETAINED_PUBLISHES
from diloco_jax.island.mailbox import Arrival
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.island.boundary import AdoptTraits, TakeOutcome
from diloco_jax.protocol.messages import (
    FIRST_VERSION,
    DeltaKey,
    Prepared,
    Version,
)
from diloco_jax.simulation.coordinator import Received
from diloco_jax.simulation.island import VirtualFetch

FIRST_ANCHOR = b"first"
MADE_UP = b"made up "
"""Begins the value of an anchor that an island made up; no digest is as long."""


def digest(*parts: object) -> bytes:
    """Return a digest of the representations of these objects."""
    return _hash(repr(parts).encode())


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


class Delta(NamedTuple):
    """An encoded delta: the island's steps [start, stop), against `base`."""

    start: int
    stop: int
    base: Version
    finite: bool
    norm: float
    honest: bool
    """True if `norm` is its true length."""


class Anchor(NamedTuple):
    """Version and value of a fragment."""

    version: Version
    value: bytes

    def next(self, publish: bytes) -> Anchor:
        """Return the anchor that a publish leads to."""
        return Anchor(self.version.next(), _hash(self.value + publish))

    def made_up(self, ahead: int) -> Anchor:
        """Return one that a liar gives out for it, so many merges ahead of it."""
        version = self.version._replace(number=self.version.number + ahead)
        return Anchor(version, MADE_UP + _hash(self.value))

    @property
    def is_made_up(self) -> bool:
        """True if no merges lead to it."""
        return self.value.startswith(MADE_UP)


class Anchors:
    """`coordinator.Merging`: a coordinator's anchors."""

    def __init__(self, anchors: tuple[Anchor, ...]) -> None:
        self.anchors = list(anchors)
        self._publishes: list[deque[tuple[Version, bytes]]] = [
            deque(maxlen=RETAINED_PUBLISHES) for _ in anchors
        ]
        self._computed: dict[int, bytes] = {}

    def receive(self, key: DeltaKey, encoded: Delta) -> Received:
        return Received(encoded, "" if encoded.finite else "non_finite", encoded.norm)

    def compute(self, merge: Merge, deltas: Sequence[Delta]) -> Prepared:
        publish = digest(
            merge.version, merge.contributions, list(deltas), merge.share, merge.final
        )
        self._computed[merge.fragment] = publish
        named = publish.hex()
        return Prepared(digest=named, payload_bytes=len(publish), stripes={"": named})

    def publish(self, fragment: int) -> bytes:
        """Return the encoded publish of the computed merge."""
        return self._computed[fragment]

    def commit(self, fragment: int, version: Version) -> None:
        self.replay(fragment, version, self._computed.pop(fragment))

    def load(self, fragment: int, anchor: Anchor) -> None:
        """Take over a snapshot of a fragment."""
        self.anchors[fragment] = anchor
        self._publishes[fragment].clear()
        self._computed.pop(fragment, None)

    def replay(self, fragment: int, version: Version, publish: bytes) -> None:
        """Apply a committed publish."""
        self.anchors[fragment] = self.anchors[fragment].next(publish)
        self._publishes[fragment].append((version, publish))

    def fetch(self, fragment: int, want: Version, have: Version | None) -> VirtualFetch:
        anchor = self.anchors[fragment]
        chain = [p for v, p in self._publishes[fragment] if have and v > have]
        missed = anchor.version.number - have.number if have else 0
        if have and chain and (have.term, len(chain)) == (anchor.version.term, missed):
            return VirtualFetch(anchor.version, 0, chain)
        return VirtualFetch(anchor.version, 0, anchor)


@dataclasses.dataclass
class _Local:
    anchor: Anchor
    start: int = 0
    """First step with an effect in (local - base)."""
    start_before: int = 0
    """`start` before the outstanding take, as long as that take can be reopened."""


class DigestBody:
    """`island.Body` of one incarnation.

    peak: learning rate whose steps have length 1; an honest delta goes straight on.
    adopted: called with the fragment and every adopted anchor; kept: the delta of the
    last take stays beside it.
    trained: called at every step.
    """

    def __init__(
        self,
        rule: AdoptTraits,
        peak: float,
        adopted: Callable[..., None],
        trained: Callable[[int, np.ndarray], None],
    ) -> None:
        self.finite = True
        """True if the next delta will be finite."""
        self.lie = 1.0
        """Factor of the length of the next deltas."""
        self._rule, self._adopted, self._trained = rule, adopted, trained
        self._locals: dict[int, _Local] = {}
        self._peak, self._steps = peak, 0
        self._lengths = [0.0]
        """Length of the way up to each step."""

    def begin(self, fetched: Mapping[int, VirtualFetch]) -> None:
        for fragment, whole in fetched.items():
            self._locals[fragment] = _Local(whole.data)
            self._adopted(fragment, whole.data, kept=False)

    def arrival(self, fragment: int, fetched: VirtualFetch) -> Arrival:
        version, data = fetched.version, fetched.data
        if isinstance(data, Anchor):
            return Arrival(fragment=fragment, version=version, anchor=(data,))
        publishes = tuple((publish,) for publish in data)
        return Arrival(fragment=fragment, version=version, publishes=publishes)

    def anchor(self, fragment: int) -> Anchor:
        """Return the island's anchor of a fragment."""
        return self._locals[fragment].anchor

    def train(self, positions: np.ndarray, learning_rate: float) -> None:
        self._trained(self._steps, positions)
        self._steps += 1
        self._lengths.append(self._lengths[-1] + learning_rate / self._peak)

    def take(self, fragment: int) -> Delta:
        local = self._locals[fragment]
        finite, self.finite = self.finite, True
        length = self._lengths[self._steps] - self._lengths[local.start]
        delta = Delta(
            local.start,
            self._steps,
            local.anchor.version,
            finite,
            norm=self.lie * length,
            honest=self.lie == 1,
        )
        local.start_before, local.start = local.start, self._steps
        return delta

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        local = self._locals[arrival.fragment]
        if arrival.anchor is not None:
            local.anchor = arrival.anchor[0]
        for (publish,) in arrival.publishes:
            local.anchor = local.anchor.next(publish)
        if self._rule.loses_steps:
            local.start = self._steps
        if not keep:
            # The local value no longer holds the last take, which cannot be reopened.
            local.start_before = local.start
        self._adopted(arrival.fragment, local.anchor, kept=keep)

    def judge(self, fragment: int, outcome: TakeOutcome) -> None:
        local = self._locals[fragment]
        if outcome == "reopened":
            local.start = local.start_before
        elif outcome == "reset":
            local.start = self._steps


def first_anchors(fragments: int) -> tuple[Anchor, ...]:
    """Return the anchors of a new run."""
    return (Anchor(FIRST_VERSION, FIRST_ANCHOR),) * fragments
