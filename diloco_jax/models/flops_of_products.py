"""Floating-point operations of the matrix products of any traced program."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def product_flops(jaxpr: Any) -> float:
    """Count 2 operations for each multiplication and addition of matrix products.

    The body of a scan counts once per iteration, the body of a loop of unknown length
    once, and of the branches of a condition only the most expensive one.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            depth = math.prod(shape[axis] for axis in contracted)
            total += 2.0 * depth * math.prod(equation.outvars[0].aval.shape)
        inside = [product_flops(inner) for inner in _programs(equation.params)]
        if equation.primitive.name == "cond":
            total += max(inside)
        else:
            total += equation.params.get("length", 1) * sum(inside)
    return total


def _programs(params: dict[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            program = getattr(part, "jaxpr", part)
            if hasattr(program, "eqns"):
                yield program
