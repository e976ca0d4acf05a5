"""Causal grouped-query attention: one function for CPU and GPU, one kernel for TPU.

The kernel is Pallas splash attention on a mesh: sequences and heads are cut, nothing is
gathered.

`B` sequences, `T` tokens, `N` query heads, `K` key and value heads, `H` head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from diloco_jax.config.config import LANES, require_blocks
from diloco_jax.models.model import Layout


class Attend(Protocol):
    """Attention of query, key and value; softmax in f32."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        window: int = 0,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        """Return [B, T, N, H] of [B, T, N, H], [B, T, K, H] and [B, T, K, H].

        window: tokens that each token attends to, itself included; 0 = all earlier.
        segments: int32 [B, T]; a token attends to those of its own document alone."""
        ...


Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`Attend` with window and segments bound."""
ATTENDED = "attended"
"""Name of attention's results for checkpoint policies."""


def dot_product(layout: Layout) -> Attend:
    """Return attention by the plain formula, compiled by XLA."""

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        window: int = 0,
        segments: jax.Array | None = None,
    ) -> jax.Array:
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

    return attend


def auto(layout: Layout) -> Attend:
    """Return the kernel on TPUs if it fits the shapes, else the plain formula."""
    if layout.platform != "tpu":
        return dot_product(layout)
    plain, kernel = dot_product(layout), splash(layout)

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        window: int = 0,
        segments: jax.Array | None = None,
    ) -> jax.Array:
        fits = query.shape[1] % LANES == 0
        return (kernel if fits else plain)(query, key, value, window, segments)

    return attend


LARGEST_BLOCK = 512
"""Tokens per block; larger blocks of f32 gradients exceed a v5p's vector memory."""


def splash(layout: Layout) -> Attend:
    """Return attention by the Pallas kernel for TPUs; other devices interpret it,
    slowly.
    """
    # Pallas takes a third of a second to import.
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas

    def attend(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        window: int = 0,
        segments: jax.Array | None = None,
    ) -> jax.Array:
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
            functools.partial(one_device, window=window),
            mesh=layout.mesh,
            in_specs=tuple(specs),
            out_specs=specs[0],
            check_vma=False,
        )
        mixed: jax.Array = mapped(*arrays)
        return mixed.swapaxes(1, 2)

    def one_device(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: jax.Array | None = None,
        *,
        window: int,
    ) -> jax.Array:
        """Return [B, N, T, H] of one device's sequences and heads."""
        heads, length = query.shape[1:3]
        block = max(
            n for n in range(LANES, LARGEST_BLOCK + 1, LANES) if length % n == 0
        )
        square = (length, length)
        mask: pallas.splash_attention_mask.Mask = pallas.CausalMask(square)
        if window:
            mask = pallas.LocalMask(square, (window - 1, 0), offset=0)
        kernel = pallas.make_splash_mha_single_device(
            pallas.MultiHeadMask([mask] * heads),
            block_sizes=pallas.BlockSizes(
                block_q=block,
                block_kv=block,
                block_q_dkv=block,
                block_kv_dkv=block,
                block_q_dq=block,
                block_kv_dq=block,
            ),
            residual_checkpoint_name=ATTENDED,
            interpret=layout.platform != "tpu",
        )
        documents = None
        if segments is not None:
            documents = pallas.SegmentIds(q=segments, kv=segments)
        mixed: jax.Array = jax.vmap(kernel)(query, key, value, documents)
        return mixed

    return attend


ATTENTION: dict[str, Callable[[Layout], Attend]] = {
    "auto": auto,
    "dot_product": dot_product,
    "splash": splash,
}
