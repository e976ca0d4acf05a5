"""Causal grouped-query attention: one function for CPU and GPU, one kernel for TPU.

`B` sequences, `T` tokens, `N` query heads, `K` key and value heads, `H` head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
from jax.ad_checkpoint import checkpoint_name

from diloco_jax.config.validation import LANES
from diloco_jax.models.layout import Layout


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


def splash(layout: Layout) -> Attend:
    """Return attention by the Pallas kernel for TPUs; other devices interpret it,
    slowly.
    """
    # Pallas takes a third of a second to import.
    from diloco_jax.models.splash import make_splash

    return make_splash(layout, ATTENDED)


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


ATTENTION: dict[str, Callable[[Layout], Attend]] = {
    "auto": auto,
    "dot_product": dot_product,
    "splash": splash,
}
