"""Causal grouped-query attention: one function for CPU and GPU, one kernel for TPU.

The kernel is Pallas splash attention on a mesh: sequences and heads are cut, nothing is
gathered.

`B` sequences, `T` tokens, `N` query heads, `K` key and value heads, `H` head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from diloco_jax.config.config import LANES, require_blocks
from diloco_jax.models.model import Layout

Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Attention of query, key and value, [B, T, N, H], [B, T, K, H] and [B, T, K, H]; its
result is [B, T, N, H]."""
ATTENDED = "attended"
"""Name of attention's results for checkpoint policies."""
LARGEST_BLOCK = 512
"""Tokens per block; larger blocks of f32 gradients exceed a v5p's vector memory."""


def dot_product(
    layout: Layout,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Attend by the plain formula, compiled by XLA; softmax in f32.

    window: tokens that each token attends to, itself included; 0 = all earlier.
    segments: int32 [B, T]; a token attends to those of its own document alone.
    """
    together = None
    if segments is not None:
        together = segments[:, None, :, None] == segments[:, None, None, :]
    mixed = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=together,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
    )
    named: jax.Array = checkpoint_name(mixed, ATTENDED)  # type: ignore[no-untyped-call]
    return named


def auto(layout: Layout, query: jax.Array, *others: Any, **options: Any) -> jax.Array:
    """Attend by the kernel on TPUs if it fits the shapes, else by the plain formula."""
    fits = layout.platform == "tpu" and query.shape[1] % LANES == 0
    return (splash if fits else dot_product)(layout, query, *others, **options)


def splash(
    layout: Layout,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    window: int = 0,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Attend by the Pallas kernel for TPUs, as `dot_product`; other devices interpret
    it, slowly.
    """
    length, heads, head_dim = query.shape[1:]
    require_blocks(length)
    if key.shape[2] % layout.ways("heads"):
        # Cut between the heads of one group: each head gets keys of its own.
        group = heads // key.shape[2]
        key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    arrays = [x.swapaxes(1, 2) for x in (query * head_dim**-0.5, key, value)]
    specs = [layout.spec(("batch", "heads", None, None), x.shape) for x in arrays]
    if segments is not None:
        arrays.append(segments)
        specs.append(layout.spec(("batch", None), segments.shape))
    mapped = jax.shard_map(
        functools.partial(_one_device, layout.platform != "tpu", window),
        mesh=layout.mesh,
        in_specs=tuple(specs),
        out_specs=specs[0],
        check_vma=False,
    )
    mixed: jax.Array = mapped(*arrays)
    return mixed.swapaxes(1, 2)


def _one_device(
    interpret: bool,
    window: int,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Return [B, N, T, H] of one device's sequences and heads."""
    # Pallas takes a third of a second to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    heads, length = query.shape[1:3]
    square = (length, length)
    mask: pallas.splash_attention_mask.Mask = pallas.CausalMask(square)
    if window:
        mask = pallas.LocalMask(square, (window - 1, 0), offset=0)
    block = max(n for n in range(LANES, LARGEST_BLOCK + 1, LANES) if length % n == 0)
    names = ("q", "kv", "q_dkv", "kv_dkv", "q_dq", "kv_dq")
    sizes: dict[str, Any] = {f"block_{name}": block for name in names}
    kernel = pallas.make_splash_mha_single_device(
        pallas.MultiHeadMask([mask] * heads),
        block_sizes=pallas.BlockSizes(**sizes),
        residual_checkpoint_name=ATTENDED,
        interpret=interpret,
    )
    documents = None
    if segments is not None:
        documents = pallas.SegmentIds(q=segments, kv=segments)
    mixed: jax.Array = jax.vmap(kernel)(query, key, value, documents)
    return mixed


ATTENTION: dict[str, Callable[..., jax.Array]] = {
    "auto": auto,
    "dot_product": dot_product,
    "splash": splash,
}
