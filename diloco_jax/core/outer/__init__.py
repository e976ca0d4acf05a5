"""Outer optimizers: they apply a merged delta to the global parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.core.members import Family

if TYPE_CHECKING:
    from diloco_jax.core.outer.rule import OuterOptimizer

OPTIMIZERS: Family[OuterOptimizer] = Family(
    kind="outer optimizer",
    table={
        "sgd": "diloco_jax.core.outer.sgd:SGD",
        "nesterov": "diloco_jax.core.outer.nesterov:NESTEROV",
    },
    checker="diloco_jax.core.outer.checking:check",
    otherwise="diloco_jax.core.outer.of_optax:find",
)
