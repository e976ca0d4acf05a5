"""The global parameters: Theta, outer state, anchors and retained publishes.

One fragment at a time: decode -> weight -> merge -> outer step -> encode, piece by
piece, through the functions of `core/`. What a merge computes is invisible until it is
committed; arrays are never changed in place, so readers hold what they fetched.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.config import RunConfig
from diloco_jax.coordinator.settings import outer_settings
from diloco_jax.core.changes import apply_publish, publish
from diloco_jax.core.codecs.codec import get_codec, square_sum
from diloco_jax.core.fragments import (
    FragmentPlan,
    Params,
    digest_arrays,
    from_pieces,
    to_pieces,
)
from diloco_jax.core.merge import RULES, merging
from diloco_jax.core.merge.measures import Measuring, MergeMeasures, Sample, sampled
from diloco_jax.core.merge.merging import Encoded, rule_for
from diloco_jax.core.outer import optimizer as outer
from diloco_jax.core.payload import Part, PayloadLayout
from diloco_jax.core.weighting import WEIGHTINGS, tokens, weight
from diloco_jax.protocol.values import Contribution, Version
from diloco_jax.wire.errors import VersionGone
from diloco_jax.wire.server import FetchSource

RETAINED_PUBLISHES = 4
"""Encoded publishes kept per fragment, for islands that missed some."""
PINNED_VERSIONS = 2
"""Anchors kept per fragment for joins under way."""
BLOCK_BYTES = 4 << 20
"""Bytes that a fetch copies at a time, of parts that lie scattered in memory."""

Arrays = tuple[jax.Array, ...]


class ComputedMerge(NamedTuple):
    """A computed merge that is not visible yet."""

    version: Version
    theta: Arrays
    anchor: Arrays
    outer_state: Any
    merge_state: tuple[Any, ...]
    """State of the merge rule, by piece."""
    payload: bytes
    digest: str
    norm: float
    """Length of the merged delta."""
    measures: MergeMeasures
    sample: tuple[Sample, ...]
    """Sampled tiles of the merged delta, by piece."""


@dataclasses.dataclass
class _Fragment:
    """One fragment's arrays. `digest` is that of `theta`; empty until needed."""

    version: Version
    theta: Arrays
    anchor: Arrays
    outer_state: Any
    merge_state: tuple[Any, ...]
    last: tuple[Sample, ...]
    """`Merged.sample` of the last merge; empty if computed elsewhere."""
    digest: str
    publishes: deque[tuple[Version, bytes]]
    pins: dict[Version, tuple[Arrays, float]]
    """Anchors that are being fetched in full, and the time when they expire."""

    def expire_pins(self, now: float) -> None:
        """Free the anchors that no island can be fetching any more."""
        self.pins = {v: pin for v, pin in self.pins.items() if pin[1] > now}


class Store:
    """All fragments of a run. Merges come from one thread, fetches from any."""

    def __init__(
        self, run: RunConfig, plan: FragmentPlan, params: Params, pin_s: float
    ) -> None:
        """Start every fragment at version (1, 0) with A = Theta = `params`."""
        self.plan = plan
        self._run = run
        self._pin_s = pin_s
        self._up = get_codec(run.sync.codec_up)
        self._down = get_codec(run.sync.codec_down)
        self._settings = outer_settings(run)
        self._tx = outer.make_outer(self._settings)
        self._rule = RULES.find(run.sync.merge)
        self._weighting = WEIGHTINGS.find(run.sync.weighting)
        self._up_layouts = [PayloadLayout.of(self._up, p) for p in plan.fragments]
        self._down_layouts = [PayloadLayout.of(self._down, p) for p in plan.fragments]
        self._lock = threading.Lock()
        self._fragments: list[_Fragment] = []
        pieces = to_pieces(plan, params)
        for fragment in plan.fragments:
            theta = tuple(jnp.asarray(pieces[p.name], jnp.float32) for p in fragment)
            self._fragments.append(
                _Fragment(
                    version=Version(),
                    theta=theta,
                    anchor=theta,
                    outer_state=self._tx.init(theta),
                    merge_state=tuple(
                        merging.start(rule_for(p, self._rule), p.shape)
                        for p in fragment
                    ),
                    last=(),
                    digest="",
                    publishes=deque(maxlen=RETAINED_PUBLISHES),
                    pins={},
                )
            )

    @property
    def layouts_up(self) -> Sequence[PayloadLayout]:
        """Layouts of an encoded delta, by fragment."""
        return self._up_layouts

    def warm_up(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Compile all that merges need, so that no merge has to wait for it. A rule
        that sees all deltas at once leaves out what depends on their number. ended:
        asked between two fragments; once it is true, the rest is not compiled."""
        nothing = Contribution(
            island="", incarnation=0, tick=0, start=0, end=1, tokens=1, base=Version()
        )
        compiled = set()
        for fragment, layout in enumerate(self._up_layouts):
            alike = tuple(
                (p.piece.shape, rule_for(p.piece, self._rule)) for p in layout.placed
            )
            if alike in compiled:
                continue
            if ended():
                return
            compiled.add(alike)
            zeros = np.zeros(layout.total_bytes, np.uint8)
            for placed, array in zip(
                layout.placed, layout.unpack(zeros.data), strict=True
            ):
                sampled(Encoded(self._up, placed.piece.shape, [array]), 0)
            self.is_finite(fragment, zeros)
            for final in (False, True):
                # Deltas of zero have no direction: this compiles the fallback too.
                self.merge(fragment, Version(), [nothing], [zeros], final=final)

    def is_finite(self, fragment: int, payload: npt.NDArray[np.uint8]) -> bool:
        """Tell if an encoded delta decodes to finite numbers with a finite norm."""
        layout = self._up_layouts[fragment]
        arrays = layout.unpack(payload.data)
        squares = sum(
            square_sum(self._up, array, placed.piece.shape)
            for array, placed in zip(arrays, layout.placed, strict=True)
        )
        return squares <= merging.MOST_SQUARES

    def merge(
        self,
        fragment: int,
        version: Version,
        contributions: Sequence[Contribution],
        payloads: Sequence[npt.NDArray[np.uint8]],
        *,
        share: float = 1.0,
        final: bool,
    ) -> ComputedMerge:
        """Compute the outer step of one fragment from these deltas; change nothing yet.

        Args:
          contributions: in the order of the sum, by island name.
          payloads: uint8[payload_bytes] each, in the same order.
          share: factor of the merged delta.
          final: the flush: weighted mean, learning rate 1, momentum untouched.
        """
        state = self._fragments[fragment]
        weighting = tokens if final else self._weighting
        weights = [weight(weighting, c.tokens, c.steps) for c in contributions]
        layout = self._up_layouts[fragment]
        encoded = [layout.unpack(payload.data) for payload in payloads]
        merged, merge_state = [], list(state.merge_state)
        measuring = Measuring(weights)
        for index, placed in enumerate(layout.placed):
            deltas = Encoded(
                self._up, placed.piece.shape, [arrays[index] for arrays in encoded]
            )
            rule = rule_for(placed.piece, self._rule, final=final)
            piece = merging.merge_piece(
                rule, deltas, weights, share, merge_state[index]
            )
            measuring.add(deltas, piece)
            merged.append(piece.delta)
            merge_state[index] = piece.state
        # The outer step donates its arguments; what is current stays readable.
        theta, outer_state = jax.tree.map(
            lambda x: jnp.asarray(np.array(x)), (state.theta, state.outer_state)
        )
        if final:
            theta = outer.flush_step(theta, tuple(merged))
        else:
            theta, outer_state = outer.outer_step(
                self._tx, theta, outer_state, tuple(merged)
            )
        changes, anchor = [], []
        for new, old in zip(theta, state.anchor, strict=True):
            change, moved = publish(self._down, new, old)
            changes.append(np.asarray(change))
            anchor.append(moved)
        return ComputedMerge(
            version=version,
            theta=theta,
            anchor=tuple(anchor),
            outer_state=outer_state,
            merge_state=tuple(merge_state),
            payload=bytes(self._down_layouts[fragment].pack(changes)),
            digest=digest_arrays(theta),
            norm=measuring.norm,
            measures=measuring.finish(state.last, state.theta, theta),
            sample=tuple(measuring.sample),
        )

    def commit(self, fragment: int, merged: ComputedMerge) -> None:
        """Make a computed merge the current version."""
        with self._lock:
            state = self._fragments[fragment]
            state.version = merged.version
            state.theta, state.anchor = merged.theta, merged.anchor
            state.outer_state, state.digest = merged.outer_state, merged.digest
            state.merge_state, state.last = merged.merge_state, merged.sample
            state.publishes.append((merged.version, merged.payload))
            state.expire_pins(time.monotonic())

    def replay(
        self, fragment: int, version: Version, payload: bytes, *, final: bool
    ) -> None:
        """Apply a logged publish after a crash: Theta = A. `advance_over_publish` and
        `recovered` advance the states of outer optimizer and merge rule, which the
        flush leaves alone."""
        state = self._fragments[fragment]
        arrays = self._down_layouts[fragment].unpack(payload)
        anchor = tuple(
            apply_publish(self._down, old, jnp.asarray(array))
            for old, array in zip(state.anchor, arrays, strict=True)
        )
        if not final:
            change = tuple(n - o for n, o in zip(anchor, state.anchor, strict=True))
            state.outer_state = outer.advance_over_publish(
                self._settings, state.outer_state, change
            )
            pieces = self.plan.fragments[fragment]
            state.merge_state = tuple(
                merging.recovered(rule_for(p, self._rule), own, moved)
                for p, own, moved in zip(pieces, state.merge_state, change, strict=True)
            )
        state.version = version
        state.theta = state.anchor = anchor
        state.last = ()
        state.digest = ""
        state.publishes.append((version, payload))

    def fetch(
        self,
        fragment: int,
        want: Version,
        have: Version | None,
        part: Part = (),
    ) -> FetchSource:
        """Return a part of the publishes after `have` if all are retained, else that
        part of an anchor.

        Raises ValueError if there is no such part; VersionGone if the anchor of version
        `want` is not kept any more.
        """
        layout = self._down_layouts[fragment]
        with self._lock:
            state = self._fragments[fragment]
            kept = [
                payload
                for version, payload in state.publishes
                if have is not None and have < version <= want
            ]
            if have is not None and kept and _is_chain(have, want, len(kept)):
                tiles = [box for p in kept for box in layout.cut(p, part)]
                return _source(want, tiles, count=len(kept))
            anchor = self._pinned(state, want)
        values = layout.cut_values([np.asarray(array) for array in anchor], part)
        return _source(want, values, count=0)

    def params(self) -> Params:
        """Return the global parameters Theta as a nested dict (numpy, f32)."""
        with self._lock:
            thetas = [state.theta for state in self._fragments]
        arrays = {
            piece.name: np.asarray(value)
            for pieces, theta in zip(self.plan.fragments, thetas, strict=True)
            for piece, value in zip(pieces, theta, strict=True)
        }
        return from_pieces(self.plan, arrays)

    def digest(self) -> str:
        """Return 16 hex digits over the Theta of all fragments."""
        with self._lock:
            for state in self._fragments:
                state.digest = state.digest or digest_arrays(state.theta)
            digests = "".join(state.digest for state in self._fragments)
        return hashlib.sha256(digests.encode()).hexdigest()[:16]

    def arrays(self) -> dict[str, Any]:
        """Return what a snapshot needs, as trees of arrays: each a list by fragment."""
        with self._lock:
            return {
                "theta": [list(state.theta) for state in self._fragments],
                "anchor": [list(state.anchor) for state in self._fragments],
                "outer": [jax.tree.leaves(s.outer_state) for s in self._fragments],
                **self._merge_arrays(),
            }

    def load(self, arrays: dict[str, Any], versions: Sequence[Version]) -> None:
        """Take over what `arrays` returned, at these versions."""
        for index, (state, version) in enumerate(
            zip(self._fragments, versions, strict=True)
        ):
            state.version, state.digest, state.last = version, "", ()
            state.theta = tuple(jnp.asarray(x) for x in arrays["theta"][index])
            state.anchor = tuple(jnp.asarray(x) for x in arrays["anchor"][index])
            treedef = jax.tree.structure(state.outer_state)
            leaves = [jnp.asarray(x) for x in arrays["outer"][index]]
            state.outer_state = jax.tree.unflatten(treedef, leaves)
            if "merge" in arrays:
                treedef = jax.tree.structure(state.merge_state)
                leaves = [jnp.asarray(x) for x in arrays["merge"][index]]
                state.merge_state = jax.tree.unflatten(treedef, leaves)

    def _merge_arrays(self) -> dict[str, Any]:
        """Return the arrays of a merge rule that keeps some."""
        leaves = [jax.tree.leaves(state.merge_state) for state in self._fragments]
        return {"merge": leaves} if any(leaves) else {}

    def _pinned(self, state: _Fragment, want: Version) -> Arrays:
        now = time.monotonic()
        state.expire_pins(now)
        anchor: Arrays | None = None
        if want == state.version:
            anchor = state.anchor
        elif want in state.pins:
            anchor = state.pins[want][0]
        if anchor is None:
            raise VersionGone(
                f"version {tuple(want)} is not kept any more, the current one is "
                f"{tuple(state.version)}; fetch this fragment again"
            )
        state.pins[want] = (anchor, now + self._pin_s)
        while len(state.pins) > PINNED_VERSIONS:
            del state.pins[min(state.pins)]
        return anchor


def _is_chain(have: Version, want: Version, count: int) -> bool:
    return have.term == want.term and want.number - have.number == count


def _source(
    version: Version, boxes: Sequence[npt.NDArray[Any]], *, count: int
) -> FetchSource:
    return FetchSource(
        version=version,
        full=count == 0,
        count=count,
        buffers=[block.data for box in boxes for block in _blocks(box)],
        total=sum(box.nbytes for box in boxes),
    )


def _blocks(box: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Cut an array that is scattered in memory, so that the copy of each block, made
    when it is sent, is small."""
    if box.flags.c_contiguous or not box.size:
        return [box]
    rows = max(1, BLOCK_BYTES * len(box) // box.nbytes)
    return [box[start : start + rows] for start in range(0, len(box), rows)]
