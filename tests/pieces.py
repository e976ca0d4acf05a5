"""Pieces and merges of plain arrays, as tests look at them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.core.changes import apply_publish
from diloco_jax.core.codecs import Codec
from diloco_jax.core.families import MergeRule
from diloco_jax.core.fragments import FragmentPlan, Params, Piece, get_piece
from diloco_jax.core.merging import Encoded, merge_piece, start


def set_piece(params: Mapping[str, Any], piece: Piece, value: Any) -> Params:
    """Return new parameters with one piece replaced; all other leaves are shared."""
    key, *rest = piece.path
    if rest:
        inside = dataclasses.replace(piece, path=tuple(rest))
        return {**params, key: set_piece(params[key], inside, value)}
    layer = () if piece.layer < 0 else (piece.layer,)
    if piece.bands is None:
        leaf = jnp.asarray(params[key]).at[layer].set(value) if layer else value
        return {**params, key: leaf}
    index = (*layer, *piece.bands.index(piece.band))
    striped = piece.bands.striped(jnp.asarray(params[key]))
    changed = striped.at[index].set(piece.bands.striped(value))
    return {**params, key: piece.bands.joined(changed)}


def to_pieces(plan: FragmentPlan, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return all pieces by name, in the plan's order."""
    return {piece.name: get_piece(params, piece) for piece in plan.pieces}


def publish(codec: Codec, theta: Any, anchor: Any) -> tuple[Any, Any]:
    """Encode the change of a piece, and apply it to the anchor."""
    encoded = codec.encode(theta - anchor)
    return encoded, apply_publish(codec, anchor, encoded)


def merge_deltas(
    deltas: Sequence[Any],
    weights: Sequence[float],
    rule: MergeRule,
    share: float = 1.0,
    uses: npt.NDArray[np.float64] | None = None,
) -> npt.NDArray[np.float32]:
    """Merge arrays, f32[shape] each, by a rule without state."""
    state = start(rule, tuple(deltas[0].shape)) if deltas else ()
    encoded = Encoded.of(deltas)
    return merge_piece(rule, encoded, weights, share, state, uses=uses).delta
