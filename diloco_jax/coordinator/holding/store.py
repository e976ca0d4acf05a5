"""The global parameters: Theta, outer state, anchors and retained publishes.

A fragment is merged by itself. What a merge computes is invisible until its commit;
arrays are never changed in place, so readers hold what they fetched. All arrays lie in
the order of the tiles; `params` alone puts them in their own.

A fetch of an anchor has several stripes, which begin and break at different times, and
the hosts of an island fetch parts of one version. So an anchor is kept while a stripe
is under way, and for some seconds longer (`Pins`).

A new array of a fragment's size costs more in page faults than the arithmetic of a
merge. So memory of older versions that nobody reads is kept for it (`Spares`).
"""

from __future__ import annotations

import dataclasses
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_128

from diloco_jax import before_jax, compilation
from diloco_jax.config import RunConfig, SyncConfig
from diloco_jax.coordinator.settings import outer_settings
from diloco_jax.core import outer
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import MERGE_RULES, WEIGHTINGS
from diloco_jax.core.fragment_merge import (
    Arrays,
    FragmentMerge,
    FragmentState,
    MergeResult,
    Sample,
    Squares,
    Uses,
    sampled,
)
from diloco_jax.core.fragments import (
    Buffer,
    FragmentPlan,
    Params,
    Part,
    PayloadLayout,
    from_pieces,
    get_piece,
)
from diloco_jax.core.merging import Encoded, capped, rule_for, tokens, weight
from diloco_jax.core.tiles import (
    Passes,
    digest_all,
    digest_arrays,
    named,
    sha256_arrays,
)
from diloco_jax.protocol.messages import Contribution, Version
from diloco_jax.wire.bulk import FetchSource, part_name, source_of
from diloco_jax.wire.errors import VersionGone

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

    def holds(self, now: float, pin_s: float) -> bool:
        """Tell if a stripe is under way, or was within the last `pin_s`."""
        last = max([self.newest, *self.ended[-1:]])
        return len(self.ended) < self.begun or now <= last + pin_s

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


CACHE_LINE = 64
"""Bytes. jax reads an array that begins at such a bound where it lies, and copies
others."""


def _references(octets: Sequence[npt.NDArray[np.uint8]]) -> list[int]:
    """Return the number of references to each array, those of this count included."""
    return [sys.getrefcount(held) for held in octets]


# How many references a count adds by itself is up to the interpreter's version.
(UNREAD,) = _references([np.empty(1, np.uint8)])
"""References to an array that nothing holds but the list of `Spares`."""


class Spares:
    """Make arrays, out of the memory of arrays that nobody holds any more.

    An array's memory stays in use as long as anyone holds the array, a view of it or
    its buffer.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._octets: list[npt.NDArray[np.uint8]] = []
        """All that is in use or spare, the oldest first."""

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return an array with any content."""
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        with self._lock:
            octets = self._spare(nbytes + CACHE_LINE)
            start = -octets.ctypes.data % CACHE_LINE
            return octets[start : start + nbytes].view(dtype).reshape(shape)

    @property
    def used_bytes(self) -> int:
        """Bytes of the arrays that somebody holds; what aligns them is not counted."""
        with self._lock:
            counts = zip(self._octets, _references(self._octets), strict=True)
            return sum(o.nbytes - CACHE_LINE for o, count in counts if count != UNREAD)

    def trim(self, kept_bytes: int) -> list[npt.NDArray[np.uint8]]:
        """Give up the oldest spare memory until arrays of at most `kept_bytes` are
        left; what aligns them is not counted. It is freed with the list that is
        returned."""
        with self._lock:
            kept, given_up, spare = [], [], 0
            references = _references(self._octets)
            for octets, count in zip(
                reversed(self._octets), reversed(references), strict=True
            ):
                if count == UNREAD:
                    nbytes = octets.nbytes - CACHE_LINE
                    if spare + nbytes > kept_bytes:
                        given_up.append(octets)
                        continue
                    spare += nbytes
                kept.append(octets)
            self._octets = kept[::-1]
            return given_up

    def _spare(self, nbytes: int) -> npt.NDArray[np.uint8]:
        references = _references(self._octets)
        for octets, count in zip(self._octets, references, strict=True):
            if octets.nbytes == nbytes and count == UNREAD:
                return octets
        octets = np.empty(nbytes, np.uint8)
        self._octets.append(octets)
        return octets


RETAINED_PUBLISHES = 4
"""Encoded publishes kept per fragment, for islands that missed some: the newest one in
memory, the others where they lie on the disk."""
SPARE_ARRAYS = 3
"""Spare arrays of the largest fragment's size that are kept for the next merge: Theta,
anchor and momentum; and a publish."""


@dataclasses.dataclass
class _Fragment:
    """One fragment's arrays. `digest`: of `state.theta`; empty until needed, where no
    merge has made it."""

    version: Version
    state: FragmentState
    last: tuple[Sample, ...]
    """`MergeResult.sample` of the last merge; empty if computed elsewhere."""
    digest: str
    publishes: deque[tuple[Version, Buffer]]
    pins: Pins


class Store:
    """All fragments of a run. Any thread may call it; of one fragment, one merge at a
    time."""

    def __init__(
        self,
        run: RunConfig,
        plan: FragmentPlan,
        params: Params | None,
        pin_s: float,
        passes: Passes | None = None,
    ) -> None:
        """Start every fragment at version (1, 0).

        params: A = Theta; None: each fragment is loaded before it is used. pin_s:
        seconds for which an anchor is kept once nobody fetches it, for a stripe that
        broke and for other hosts. passes: see `use_passes`."""
        self.plan = plan
        self._weights = weights_by(run.sync)
        self._spares = Spares()
        self.empty = self._spares.array
        """Makes arrays of memory that was there before, if there is any."""
        self._merges = [
            dataclasses.replace(merge, empty=self.empty, passes=passes)
            for merge in merges_of(run, plan)
        ]
        self._spare_bytes = SPARE_ARRAYS * 4 * max(plan.sizes) + max(
            merge.layout_down.total_bytes for merge in self._merges
        )
        self._lock = threading.Lock()
        self._compiled: set[Any] = set()
        """Kinds of fragments whose merges are compiled."""
        self._parts: list[dict[str, dict[Part, int]]] = [{} for _ in plan.fragments]
        """Parts that hosts of islands in regions have, with their bytes, by fragment
        and island."""
        self._fragments: list[_Fragment] = []
        for pieces, merge in zip(plan.fragments, self._merges, strict=True):
            if params is None:
                state = merge.like()
            else:
                state = merge.begin([get_piece(params, p) for p in pieces])
            self._fragments.append(
                _Fragment(
                    version=Version(),
                    state=state,
                    last=(),
                    digest="",
                    publishes=deque(maxlen=RETAINED_PUBLISHES),
                    pins=Pins(pin_s),
                )
            )

    def use_passes(self, passes: Passes | None) -> None:
        """Compute later merges by the merge route "native"; None: by "xla"."""
        self._merges = [dataclasses.replace(m, passes=passes) for m in self._merges]

    def describe(self) -> dict[str, Any]:
        """Return the facts on which the bits of merges depend."""
        passes = self._merges[0].passes
        return {
            **before_jax.describe_environment(),
            "merge_route": compilation.route_of(passes),
        }

    @property
    def layouts_up(self) -> Sequence[PayloadLayout]:
        """Layouts of an encoded delta, by fragment."""
        return [merge.layout_up for merge in self._merges]

    def warm_up(self, fragment: int, ended: Callable[[], bool]) -> None:
        """Compile all that merges of a fragment need; a rule that sees all deltas at
        once leaves out what depends on their number. ended: once it is true, nothing is
        begun."""
        nothing = Contribution(
            island="", incarnation=0, tick=0, start=0, end=1, tokens=1, base=Version()
        )
        merge = self._merges[fragment]
        alike = tuple((p.grid, rule_for(p, merge.rule)) for p in merge.pieces)
        if ended() or alike in self._compiled:
            return
        self._compiled.add(alike)
        layout = merge.layout_up
        zeros = np.zeros(layout.total_bytes, np.uint8)
        arrays = layout.unpack(zeros.data)
        for counts in arrays[len(merge.pieces) :]:
            counts[...] = 1  # A piece that is not used is not merged.
        for piece, array in zip(merge.pieces, arrays, strict=False):
            own = Encoded(merge.up, piece.shape, [array], groups=piece.groups)
            sampled(own, 0)
        for final in (False, True):
            # Deltas of zero have no direction: this compiles the fallback too.
            self.merge(fragment, [nothing], [zeros], final=final)

    def squares(self, fragment: int, payload: npt.NDArray[np.uint8]) -> Squares:
        """Return the sums of the squares of a delta, by piece, for `is_fit`."""
        return self._merges[fragment].squares(payload.data)

    def uses(self, fragment: int, payload: npt.NDArray[np.uint8]) -> Uses:
        """Return what a delta says of the use of rows."""
        return self._merges[fragment].uses(payload.data)

    def merge(
        self,
        fragment: int,
        contributions: Sequence[Contribution],
        payloads: Sequence[npt.NDArray[np.uint8]],
        squares: Sequence[Squares] | None = None,
        *,
        share: float = 1.0,
        final: bool,
    ) -> MergeResult:
        """Compute the outer step of one fragment from these deltas; change nothing yet.

        Args:
          contributions: in the order of the sum, by island name.
          payloads: uint8[payload_bytes] each, in the same order.
          squares: `squares` of each payload; None: they are computed.
          share: factor of the merged delta.
          final: the flush: weighted mean, learning rate 1, momentum untouched.
        """
        current = self._fragments[fragment]
        return self._merges[fragment].merge(
            current.state,
            [payload.data for payload in payloads],
            squares or [self.squares(fragment, payload) for payload in payloads],
            self._weights(contributions, final),
            share=share,
            final=final,
            last=current.last,
            tokens=[contribution.tokens for contribution in contributions],
        )

    def commit(self, fragment: int, version: Version, merged: MergeResult) -> None:
        """Make a computed merge the current version, with this number."""
        with self._lock:
            current = self._fragments[fragment]
            current.version, current.state = version, merged.state
            current.last, current.digest = merged.sample, merged.digest
            current.publishes.append((version, merged.payload))
            current.pins.expire()
        self.trim()

    def trim(self) -> None:
        """Free spare memory that merges do not need, as a restore leaves it."""
        self._spares.trim(self._spare_bytes)

    def put_aside(
        self, fragment: int, mapped: Callable[[int, Version], Buffer | None]
    ) -> None:
        """Free the memory of a fragment's newest publish: another one will come.
        mapped: returns a publish as mapped from the disk, or None."""
        current = self._fragments[fragment]
        if not current.publishes:
            return
        version, _ = current.publishes[-1]
        if (found := mapped(fragment, version)) is not None:
            with self._lock:
                kept = [(v, found if v == version else p) for v, p in current.publishes]
                current.publishes = deque(kept, maxlen=RETAINED_PUBLISHES)

    @property
    def infers_momentum(self) -> bool:
        """True if `replay` advances the outer optimizer."""
        return outer.is_invertible(self._merges[0].settings)

    def replay(
        self,
        fragment: int,
        version: Version,
        payload: Buffer,
        *,
        final: bool,
        digested: bool = False,
        unused: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        """Apply a logged publish after a crash (see `FragmentMerge.replay`). digested:
        no other follows, and the digest of Theta is made in the same pass."""
        current = self._fragments[fragment]
        merge, digest = self._merges[fragment], xxh3_128() if digested else None
        current.state = merge.replay(
            current.state, payload, final=final, digest=digest, unused=unused
        )
        current.version, current.last = version, ()
        current.digest = named(digest) if digest is not None else ""
        current.publishes.append((version, payload))

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
        layout = self._merges[fragment].layout_down
        with self._lock:
            state = self._fragments[fragment]
            kept = [
                payload
                for version, payload in state.publishes
                if have is not None and have < version <= want
            ]
            if have is not None and kept and _is_chain(have, want, len(kept)):
                tiles = [box for p in kept for box in layout.cut(p, part)]
                return source_of(want, tiles, count=len(kept))
            current = state.state.anchor if want == state.version else None
            pin = state.pins.begin(want, current)
        if pin is None:
            raise VersionGone(
                f"version {tuple(want)} is not kept any more, the current one is "
                f"{tuple(state.version)}; fetch this fragment again"
            )
        source = source_of(want, layout.cut_values(pin.anchor, part), count=0)
        # The stripe ends once nothing holds its source any more.
        weakref.finalize(source, pin.end).atexit = False
        return source

    def note_part(self, fragment: int, island: str, part: Part, hosts: int) -> None:
        """Note that a host of an island in a region has this part of a fragment's
        publishes, for `stripes`. Whatever is asked for, all parts of one island are no
        more than the whole, and no more than it has hosts."""
        layout = self._merges[fragment].layout_down
        size = layout.part_bytes(part)
        if size > layout.total_bytes:
            return
        with self._lock:
            own = self._parts[fragment].setdefault(island, {})
            own[part] = size
            while len(own) > hosts or sum(own.values()) > layout.total_bytes:
                del own[next(iter(own))]

    def stripes(self, fragment: int, payload: Buffer) -> dict[str, str]:
        """Return SHA-256 of each such part of a publish, by `part_name`."""
        layout = self._merges[fragment].layout_down
        with self._lock:
            parts = {part for own in self._parts[fragment].values() for part in own}
        return {part_name(p): sha256_arrays(layout.cut(payload, p)) for p in parts}

    def values(
        self, fragment: int, version: Version, arrays: Sequence[Any], part: Part
    ) -> FetchSource:
        """Return a part of a fragment's values, f32, such as its Theta."""
        layout = self._merges[fragment].layout_down
        return source_of(version, layout.cut_values(arrays, part), count=0)

    def expire_pins(self) -> None:
        """Free the anchors that no island is fetching any more."""
        with self._lock:
            for fragment in self._fragments:
                fragment.pins.expire()

    def params(self) -> Params:
        """Return Theta as a nested dict (numpy, f32), in its own order."""
        with self._lock:
            thetas = [current.state.theta for current in self._fragments]
        return params_of(self.plan, thetas)

    def digest(self) -> str:
        """Return 16 hex digits over the Theta of all fragments."""
        return digest_all(map(self.digest_of, range(len(self._fragments))))

    def digest_of(self, fragment: int) -> str:
        """Return the digest of a fragment's Theta."""
        with self._lock:
            current = self._fragments[fragment]
            state, digest = current.state, current.digest
        digest = digest or digest_arrays(state.theta)
        with self._lock:
            if current.state is state:
                current.digest = digest
        return digest

    def arrays(self, fragment: int) -> dict[str, list[Any]]:
        """Return what a snapshot of a fragment needs; merges do not change it."""
        with self._lock:
            return _as_lists(self._fragments[fragment].state)

    def first(self, fragment: int, values: Iterable[Any]) -> dict[str, list[Any]]:
        """Return `arrays` with which a fragment begins at these values, by piece."""
        return _as_lists(self._merges[fragment].begin(values))

    def versions(self) -> list[Version]:
        """Return the current version of every fragment."""
        with self._lock:
            return [fragment.version for fragment in self._fragments]

    def current(self, fragment: int) -> tuple[Version, dict[str, list[Any]]]:
        """Return the version of a fragment, and its `arrays`."""
        with self._lock:
            found = self._fragments[fragment]
            return found.version, _as_lists(found.state)

    def room(self, fragment: int) -> dict[str, list[Any]]:
        """Return `arrays` with any content."""
        like = _as_lists(self._merges[fragment].like())
        return {
            name: [
                (self.empty if array.ndim else np.empty)(array.shape, array.dtype)
                for array in own
            ]
            for name, own in like.items()
        }

    def load(
        self, fragment: int, arrays: dict[str, list[Any]], version: Version
    ) -> None:
        """Set the fragment's arrays, as `arrays` returned them, and its version."""
        like, current = self._merges[fragment].like(), self._fragments[fragment]
        whole = {name: [np.asarray(x) for x in own] for name, own in arrays.items()}
        rules = jax.tree.structure(like.rules)
        current.state = FragmentState(
            tuple(whole["theta"]),
            tuple(whole["anchor"]),
            jax.tree.unflatten(jax.tree.structure(like.outer), whole["outer"]),
            jax.tree.unflatten(rules, whole.get("merge", [])),
        )
        current.version, current.digest, current.last = version, "", ()


def merges_of(run: RunConfig, plan: FragmentPlan) -> list[FragmentMerge]:
    """Return the merges of a run, by fragment."""
    return [
        FragmentMerge(
            pieces=pieces,
            up=get_codec(run.sync.codec_up),
            down=get_codec(run.sync.codec_down),
            rule=MERGE_RULES.find(run.sync.merge),
            settings=outer_settings(run),
            most=run.sync.weight_cap,
        )
        for pieces in plan.fragments
    ]


def weights_by(
    sync: SyncConfig,
) -> Callable[[Sequence[Contribution], bool], list[float]]:
    """Return what gives the weights of a merge's deltas, and is told whether the merge
    is `final`, as `Store.merge` has it."""
    weighting, most = WEIGHTINGS.find(sync.weighting), sync.weight_cap

    def weights_of(deltas: Sequence[Contribution], final: bool) -> list[float]:
        by = tokens if final else weighting
        found = capped([weight(by, d.tokens, d.steps) for d in deltas], most)
        return [*map(float, found)]

    return weights_of


def params_of(plan: FragmentPlan, thetas: Sequence[Arrays]) -> Params:
    """Return Theta, by fragment in the order of the tiles, as a nested dict."""
    arrays = {
        piece.name: piece.grid.from_tiles(value)
        for pieces, theta in zip(plan.fragments, thetas, strict=True)
        for piece, value in zip(pieces, theta, strict=True)
    }
    return from_pieces(plan, arrays)


def _as_lists(state: FragmentState) -> dict[str, list[Any]]:
    kept = jax.tree.leaves(state.rules)
    return {
        "theta": list(state.theta),
        "anchor": list(state.anchor),
        "outer": jax.tree.leaves(state.outer),
        **({"merge": kept} if kept else {}),
    }


def _is_chain(have: Version, want: Version, count: int) -> bool:
    return have.term == want.term and want.number - have.number == count
