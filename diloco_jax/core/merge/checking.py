"""Checks a merge rule from outside the package on tiny pieces."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from diloco_jax.core.fragments import (
    FragmentPlan,
    from_pieces,
    get_piece,
    plan_fragments,
)
from diloco_jax.core.merge.deltas import Plain
from diloco_jax.core.merge.merging import merge_piece, recovered, start
from diloco_jax.core.merge.rule import MergeRule
from diloco_jax.core.rounding import equal_but_for_rounding

SHAPES = ((64, 64), (5,))
"""Shapes of the pieces: of four tiles, and of one."""
ISLANDS = 3
BANDED = 4
"""Fragments of the first shape, which is larger than one and comes in bands."""
WHOLE = "whole"
"""Name of the tensor."""
KINDS = ("sum", "fold", "elementwise", "whole")


def check(rule: MergeRule) -> None:
    """Raise an error that describes the fault of the rule, if it has one."""
    needs = getattr(rule, "needs", None)
    if needs not in KINDS:
        raise ValueError(
            f"needs = {needs!r}; a merge rule is an object whose `needs` is one of "
            f"{', '.join(KINDS)}: make one of a class in diloco_jax.core.merge.rule"
        )
    for shape in SHAPES:
        state, rng = start(rule, shape), np.random.default_rng(0)
        like = jax.tree.map(jnp.shape, state)
        for islands in (ISLANDS, 1):
            for scale in (1.0, 0.0):
                drawn = rng.standard_normal((islands, *shape)) * scale
                deltas = Plain(list(drawn.astype(np.float32)))
                weights = [1.0 + i for i in range(islands)]
                merged = merge_piece(rule, deltas, weights, 0.5, state)
                if not np.isfinite(merged.delta).all():
                    raise ValueError(
                        "it made numbers that are not finite of finite deltas, which "
                        "may be zero"
                    )
                if jax.tree.map(jnp.shape, merged.state) != like:
                    raise ValueError(
                        f"a merge makes a state of shapes "
                        f"{jax.tree.map(jnp.shape, merged.state)} of one of {like}; it "
                        f"must keep its structure"
                    )
                state = merged.state
    if rule.by_element and not merges_bands_alike(rule):
        raise ValueError(
            "it has by_element = True, but what it makes of an element depends on "
            "other elements too, or on the shape: bands of a piece are merged "
            "otherwise than the whole; set by_element = False, in a rule that sees "
            "whole pieces (needs = 'fold' or 'whole')"
        )


def merges_bands_alike(rule: MergeRule) -> bool:
    """Tell whether merging a piece band by band gives the same result as merging it
    whole.

    It tries two merges with a crash in between.
    """
    rng, shape = np.random.default_rng(0), SHAPES[0]
    # The ratio of the islands' lengths differs from row to row.
    lengths = 10.0 ** np.outer(np.arange(ISLANDS), np.linspace(0, 1, shape[0]))
    deltas = [
        (rng.standard_normal(shape) * rows[:, None]).astype(np.float32)
        for rows in lengths
    ]
    given, axes = {WHOLE: shape}, {WHOLE: (None, None)}
    whole, cut = (
        _merged(
            rule, plan_fragments(given, axes, count, may_cut=lambda _: True), deltas
        )
        for count in (1, BANDED)
    )
    return equal_but_for_rounding(cut, whole)


def _merged(
    rule: MergeRule, plan: FragmentPlan, deltas: Sequence[npt.NDArray[np.float32]]
) -> npt.NDArray[np.float32]:
    """Return what two merges of the plan's pieces make: f32[2, *shape]."""
    weights = [1.0 + i for i in range(ISLANDS)]
    first: dict[str, npt.NDArray[np.float32]] = {}
    second: dict[str, npt.NDArray[np.float32]] = {}
    for piece in plan.pieces:
        own = Plain([get_piece({WHOLE: delta}, piece) for delta in deltas])
        state = start(rule, piece.shape)
        for found in (first, second):
            merged = merge_piece(rule, own, weights, 0.5, state)
            found[piece.name] = merged.delta
            state = recovered(rule, merged.state, merged.delta)
    return np.stack([from_pieces(plan, found)[WHOLE] for found in (first, second)])
