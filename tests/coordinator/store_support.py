"""Deltas and merges for tests of the store."""

import jax.numpy as jnp
import numpy as np

from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.core.tiles import TileGrid
from diloco_jax.protocol.messages import Contribution, Version


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
