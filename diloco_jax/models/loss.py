"""Cross entropy of the next token, without all logits at once.

With 256 k words the logits of a batch take more memory than the model. They are
computed one chunk of positions at a time, and again in the backward pass.

`B` sequences, `T` tokens, `C` positions of a chunk, `D` model, `V` vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from diloco_jax.models.layout import Layout

LOGITS_AT_A_TIME = 1 << 27
"""Logits of each sequence that stand at a time: 512 MiB of f32."""


def positions_at_a_time(vocab_size: int) -> int:
    """Return the default of C: in practice all, up to some ten thousand words."""
    return max(LOGITS_AT_A_TIME // vocab_size, 1)


def token_losses(
    x: jax.Array, table: jax.Array, targets: jax.Array, chunk: int, layout: Layout
) -> jax.Array:
    """Return the cross entropies in nats, f32 [B, T].

    Args:
      x: the last activations, [B, T, D].
      table: the output embedding, [D, V].
      targets: int32 [B, T].
      chunk: C; 0 = T.
      layout: layout on the mesh.
    """

    def losses(x: jax.Array, targets: jax.Array) -> jax.Array:
        logits = jnp.matmul(x, table, preferred_element_type=jnp.float32)
        logits = layout.constrain(logits, ("batch", None, "vocab"))
        found: jax.Array = optax.softmax_cross_entropy_with_integer_labels(
            logits, targets
        )
        return found

    length = targets.shape[1]
    if chunk < 1 or chunk >= length:
        return losses(x, targets)
    count = -(-length // chunk)

    def cut(a: jax.Array) -> jax.Array:
        """Cut [B, T, ...] into [count, B, C, ...], the end filled with zeros."""
        missing = count * chunk - length
        a = jnp.pad(a, [(0, 0), (0, missing)] + [(0, 0)] * (a.ndim - 2))
        return a.reshape(a.shape[0], count, chunk, *a.shape[2:]).swapaxes(0, 1)

    remade = jax.checkpoint(losses, prevent_cse=False)
    parts: jax.Array = jax.lax.map(lambda part: remade(*part), (cut(x), cut(targets)))
    return parts.swapaxes(0, 1).reshape(-1, count * chunk)[:, :length]
