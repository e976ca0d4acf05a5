"""Outer optimizers by their names in optax and optax.contrib."""

from __future__ import annotations

import functools
import inspect

import optax

from diloco_jax.core import from_optax
from diloco_jax.core.outer import OPTIMIZERS
from diloco_jax.core.outer.rule import OuterOptimizer

MOMENTA = ("momentum", "b1")


def find(name: str) -> OuterOptimizer:
    """Find an optimizer of optax. `outer.momentum` is its `momentum` or its `b1`; other
    arguments keep optax's defaults.

    Raises:
      ValueError: optax has none of that name that takes a learning rate.
    """
    known = ", ".join(OPTIMIZERS.table)
    function = from_optax.find(
        name, f"choose {known}, or name your own as 'path/to/file.py:name'"
    )
    takes = inspect.signature(function).parameters

    def make(momentum: float) -> optax.GradientTransformation:
        own = {n: momentum for n in MOMENTA if n in takes}
        return function(**{from_optax.RATE: 1.0, **own})

    return functools.wraps(function)(make)
