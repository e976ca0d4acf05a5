"""Rotary positions (arXiv 2104.09864), and their scaling to longer sequences.

`B` sequences, `T` tokens, `N` heads, `H` head.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.config import ModelConfig

Rotations = tuple[jax.Array, jax.Array]
"""Cosines and sines of the angles of all positions."""
Frequencies = npt.NDArray[np.float64]


def frequencies(config: ModelConfig, *, windowed: bool) -> Frequencies:
    """Return the angle by which each pair of a head turns per position, [H / 2]."""
    base = config.rope_window_base if windowed else config.rope_base
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    plain: Frequencies = base**-exponents
    if windowed or config.rope_scaling == "none":
        return plain
    slow: Frequencies = plain / config.rope_factor
    if config.rope_scaling == "linear":
        return slow
    # Llama 3.1: long waves grow, short ones stay, those between are interpolated.
    waves = config.rope_original_length * plain / (2 * math.pi)
    low, high = config.rope_low_factor, config.rope_high_factor
    kept = np.clip((waves - low) / (high - low), 0, 1)
    mixed: Frequencies = kept * plain + (1 - kept) * slow
    return mixed


def rotations(length: int, of_pairs: Frequencies) -> Rotations:
    """Return cosines and sines of the rotations, f32 [1, T, 1, H / 2]."""
    angles = np.arange(length)[None, :, None, None] * of_pairs
    return (
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
    )


def restarted(turns: Rotations, segments: jax.Array) -> Rotations:
    """Return the rotations, f32 [B, T, 1, H / 2], of positions that begin anew with
    each document. segments: int32 [B, T], a document's tokens side by side."""
    begins = jnp.diff(segments, axis=1, prepend=-1) != 0
    here = jnp.arange(segments.shape[1])
    positions = here - jax.lax.cummax(jnp.where(begins, here, 0), axis=1)
    cosine, sine = (table[0][positions] for table in turns)
    return cosine, sine


def rotate(x: jax.Array, turns: Rotations) -> jax.Array:
    """Rotate the pairs (x[i], x[i + H / 2]) of each head by their position's angle."""
    cosine, sine = turns
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate((a * cosine - b * sine, b * cosine + a * sine), axis=-1)
    return turned.astype(x.dtype)
