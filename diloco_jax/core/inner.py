"""The inner optimizer of an island: optax with learning rate 1, times the rate of
`learning_rate.py`.

Axis names decide which parameters decay and which Muon orthogonalises: a stack of
vectors is not a matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from diloco_jax.core.fragments import LAYERS, VOCAB
from diloco_jax.core.from_optax import RATE, Argument, call, check, from_optax

NAMES = ("adamw", "lion", "sgd", "muon")
"""Optimizers known to fit, as long as they get no arguments."""


def make_inner(
    name: str,
    *,
    axes: Mapping[str, Any],
    arguments: Sequence[tuple[str, Argument]] = (),
    beta1: float = 0.9,
    beta2: float = 0.95,
    moment_dtype: str = "float32",
    weight_decay: float = 0.0,
    clip_norm: float = 0.0,
) -> optax.GradientTransformation:
    """Make the optimizer at learning rate 1; scale its updates by a rate.

    Args:
      name: one in NAMES, or any in optax or optax.contrib that fits (`from_optax`).
        "sgd" ignores the betas. "muon" orthogonalises the matrices (two axes besides
        "layers", none of them "vocab"), layer by layer, with momentum beta1; all else
        goes through Adam with Nesterov momentum. Anything that optax computes per
        tensor, such as a trust ratio, is per stack of layers.
      axes: nested like the parameters; leaves are tuples of logical axis names.
      arguments: further arguments of optax's function.
      moment_dtype: dtype of the first moment, or of Muon's momentum.
      weight_decay: decay of parameters with at least two axes besides "layers".
      clip_norm: longest global gradient norm; 0 = any.

    Raises:
      ValueError: unknown name or argument, or an optimizer that does not fit.
    """
    more = dict(arguments)

    def make(axes: Mapping[str, Any], rate: float) -> optax.GradientTransformation:
        decays = _map_axes(lambda names: len(_matrix_axes(names)) >= 2, axes)
        if name == "sgd":
            decay = optax.add_decayed_weights(weight_decay, decays)
            return optax.chain(decay, call(name, optax.sgd, {RATE: rate}, more))
        if name == "muon":
            # 0.2 scales Muon's updates to the size of AdamW's, so that one learning
            # rate serves both (arXiv 2502.16982).
            own = {
                RATE: rate,
                "beta": beta1,
                "mu_dtype": moment_dtype,
                "adam_b1": beta1,
                "adam_b2": beta2,
                "muon_weight_dimension_numbers": _map_axes(_muon_numbers, axes),
                "consistent_rms": 0.2,
            }
            direction = call(name, optax.contrib.muon, own, more)
            # Muon's own decay of non-matrices takes no mask.
            decay = optax.add_decayed_weights(-rate * weight_decay, decays)
            return optax.chain(direction, decay)
        return from_optax(
            name,
            more,
            rate=rate,
            beta1=beta1,
            beta2=beta2,
            moment_dtype=moment_dtype,
            weight_decay=weight_decay,
            decays=decays,
        )

    optimizer = make(axes, 1.0)
    if more or name not in NAMES:
        check(name, more, make)
    if clip_norm:
        return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
    return optimizer


def _map_axes(function: Any, axes: Mapping[str, Any]) -> Any:
    return jax.tree.map(function, axes, is_leaf=lambda x: isinstance(x, tuple))


def _matrix_axes(names: tuple[str | None, ...]) -> tuple[int, ...]:
    return tuple(i for i, name in enumerate(names) if name != LAYERS)


def _muon_numbers(
    names: tuple[str | None, ...],
) -> optax.contrib.MuonDimensionNumbers | None:
    matrix = _matrix_axes(names)
    if len(matrix) != 2 or VOCAB in names:
        return None
    return optax.contrib.MuonDimensionNumbers(*matrix)
