"""Times of the coordinator's merges: its own store, a fragment of one large piece."""

from __future__ import annotations

import dataclasses
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diloco_jax.config import RunConfig
from diloco_jax.coordinator.holding.fragment_snapshots import Publishes
from diloco_jax.coordinator.holding.store import RETAINED_PUBLISHES, Store
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragment_merge import MergeResult
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.tiles import Passes, TileGrid
from diloco_jax.protocol.messages import Contribution, Version

SIDE = 4096
ELEMENTS = SIDE * SIDE
"""16 Mi: more than caches hold."""
TILE, IN_CACHE = 128, 500
"""Side of a tile of a large piece, and how often each pass over it is made."""
PIN_S = 60.0


class MergeTimes(NamedTuple):
    """Core seconds, the least of several repetitions."""

    check: float
    """The pass over one delta on its arrival."""
    merge: float
    """All that follows, with all deltas, the digest of Theta too."""
    write: float
    """The publish is sealed and on the disk."""
    replay: float
    """Recovery's pass over one publish."""


def time_merges(
    run: RunConfig,
    codec: str,
    islands: int,
    repetitions: int,
    passes: Passes | None,
    shape: tuple[int, int],
) -> MergeTimes:
    """Time merges of deltas of `islands` islands, a matrix of this shape each, one
    codec both ways.

    They use the rule and the outer optimizer of `run` (resolved). passes: the merge
    route.
    """
    store = store_of(run, codec, {"w": shape}, 1, passes)
    payload = encoded_delta(store, codec, 0, 0)
    # Each its own memory, as deltas of islands have.
    payloads = [payload, *(payload.copy() for _ in range(islands - 1))]
    parts = contributions(islands)
    squares = [store.squares(0, payload)] * islands
    best: dict[str, float] = {}

    def note(what: str, work: Callable[[], Any]) -> None:
        began = time.process_time()
        work()
        best[what] = min(best.get(what, np.inf), time.process_time() - began)

    def merge() -> MergeResult:
        merged = store.merge(0, parts, payloads, squares, final=False)
        store.commit(0, Version(1, 1), merged)
        return merged

    for _ in range(RETAINED_PUBLISHES + 1):  # Until memory is that of older versions.
        published = merge().payload
    store.replay(0, Version(1, 1), published, final=False)
    with tempfile.TemporaryDirectory(prefix="diloco-merging-") as folder:
        publishes = Publishes(Path(folder))

        def write() -> None:
            publishes.write(0, Version(1, 1), published, final=False)

        for _ in range(repetitions):
            note("check", lambda: store.squares(0, payload))
            note("merge", merge)
            note("write", write)
            note("replay", lambda: store.replay(0, Version(), published, final=False))
    return MergeTimes(**best)


class Repeated(Passes):
    """Passes whose every call is made again and again, over memory that is in the cache
    then; counts the core seconds of one call, the least."""

    spent = 0.0

    def _call(self, function: Any, *arguments: Any) -> None:
        best = np.inf
        for _ in range(IN_CACHE):
            began = time.process_time()
            super()._call(function, *arguments)
            best = min(best, time.process_time() - began)
        self.spent += best


def arithmetic(run: RunConfig, codec: str, islands: int, passes: Passes) -> float:
    """Return the core seconds per element of checks and merge on one tile of a large
    piece, which a core's own cache holds."""
    repeated, tile = Repeated(passes.path), TileGrid((TILE, TILE), (1, 1))
    # A piece so small would be cut into smaller tiles.
    with unittest.mock.patch.object(TileGrid, "of", return_value=tile):
        store = store_of(run, codec, {"w": tile.shape}, 1, repeated)
        payload = encoded_delta(store, codec, 0, 0)
        squares = store.squares(0, payload)
        checks = islands * repeated.spent
        repeated.spent = 0.0
        # One delta's memory for all.
        given = [payload] * islands, [squares] * islands
        store.merge(0, contributions(islands), *given, final=False)
    return (checks + repeated.spent) / tile.elements


def store_of(
    run: RunConfig,
    codec: str,
    shapes: Mapping[str, tuple[int, ...]],
    fragments: int,
    passes: Passes | None,
) -> Store:
    """Return a store of matrices with random values, one codec both ways."""
    sync = dataclasses.replace(
        run.sync, fragments=fragments, codec_up=codec, codec_down=codec
    )
    rng = np.random.default_rng(0)
    params = {
        name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()
    }
    plan = plan_fragments(
        dict(shapes), dict.fromkeys(shapes, ("embed", "mlp")), fragments
    )
    return Store(dataclasses.replace(run, sync=sync), plan, params, PIN_S, passes)


def encoded_delta(
    store: Store, codec: str, fragment: int, seed: int
) -> npt.NDArray[np.uint8]:
    """Return a random delta of a fragment of one piece, as it would arrive."""
    rng = np.random.default_rng(seed)
    (piece,) = store.plan.fragments[fragment]
    tiles = rng.standard_normal(TileGrid.of(piece.shape).in_order, np.float32)
    return np.asarray(get_codec(codec).encode_tiles(1e-3 * tiles)).reshape(-1)


def contributions(islands: int) -> list[Contribution]:
    """Return contributions of that many islands, with unequal tokens."""
    return [
        Contribution(
            island=f"{i:02}",
            incarnation=1,
            tick=1,
            start=0,
            end=4,
            tokens=100 + i,
            base=Version(),
        )
        for i in range(islands)
    ]
