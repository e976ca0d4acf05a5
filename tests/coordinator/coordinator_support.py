"""A small model: shapes and logical axes of its parameters; holders of it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from etils import epath

from diloco_jax.config import Placement
from diloco_jax.coordinator.holding.fragment_snapshots import (
    FragmentSnapshots,
    Publishes,
)
from diloco_jax.coordinator.holding.holder import StoreHolder
from diloco_jax.coordinator.holding.inbox import Inbox, Rooms
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.core.tiles import TileGrid
from diloco_jax.protocol.holding import BeginWorker
from diloco_jax.protocol.messages import Contribution, Version

SHAPES = {"embed": (16, 8), "blocks": {"w": (2, 8, 8), "scale": (2, 8)}}
AXES = {
    "embed": ("vocab", "embed"),
    "blocks": {"w": ("layers", "embed", "mlp"), "scale": ("layers", "embed")},
}
PIN_S = 60.0
WHOSE = {"run_id": "r", "run": {"total_tokens": 0}, "plan": ""}
"""Facts in the headers of an engine's snapshots."""


def arrays(store):
    """Arrays of all fragments, as snapshots take them."""
    return [store.arrays(f) for f in range(len(store.plan.fragments))]


def begun(config, **fields):
    """The first message of a lead with this config to its worker 0."""
    given = {"run_id": "r", "worker": 0, "fragments": (0, 2), "term": 1, "start": 7}
    return BeginWorker(**{"config": dataclasses.asdict(config), **given, **fields})


def make_holder(store, folder, *, whose=WHOSE, kept=None, write_within_s=60.0):
    """A holder of all fragments of a store, whose files are in this folder."""
    fragments = range(len(store.plan.fragments))
    return StoreHolder(
        store,
        Inbox(store.layouts_up, Rooms(1 << 20)),
        Publishes(folder / "publishes"),
        FragmentSnapshots(
            epath.Path(folder / "snapshots"), Placement(), fragments, whose
        ),
        kept,
        write_within_s=write_within_s,
    )


def load(store, arrays, versions):
    for fragment, version in enumerate(versions):
        store.load(fragment, arrays[fragment], version)


def contribution(island, tokens):
    return Contribution(
        island=island,
        incarnation=1,
        tick=1,
        start=0,
        end=4,
        tokens=tokens,
        base=Version(),
    )


def encoded_delta(store, fragment, seed, scale=1e-2):
    """(payload, decoded pieces) of a random delta."""
    codec = get_codec("int8")
    pieces = store.plan.fragments[fragment]
    random = np.random.default_rng(seed)
    arrays = [
        codec.encode(jnp.asarray(random.normal(size=p.shape) * scale, jnp.float32))
        for p in pieces
    ]
    payload = PayloadLayout.of(codec, pieces).pack(arrays)
    decoded = [codec.decode(a, p.shape) for a, p in zip(arrays, pieces, strict=True)]
    return np.frombuffer(payload, np.uint8), decoded


def own_order(store, fragment, arrays):
    return [
        TileGrid.of(p.shape).from_tiles(a)
        for p, a in zip(store.plan.fragments[fragment], arrays, strict=True)
    ]


def loaded(snapshots, store, fragment, through):
    """(version, arrays) of a fragment's newest snapshot up to a version."""
    arrays = store.room(fragment)
    return snapshots.find(fragment, through, arrays), arrays


def merge_once(store, fragment, version, seeds=(1, 2), final=False):
    payloads = [encoded_delta(store, fragment, seed)[0] for seed in seeds]
    parts = [contribution(n, 100 * (i + 1)) for i, n in enumerate("ab"[: len(seeds)])]
    merged = store.merge(fragment, parts, payloads, final=final)
    store.commit(fragment, version, merged)
    return merged
