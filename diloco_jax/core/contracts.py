"""Check members from outside the package on tiny pieces.

A check raises an error that describes the fault of the member, if it has one. Members
of the package have tests instead.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from diloco_jax.core import inner
from diloco_jax.core.changes import adopt
from diloco_jax.core.families import (
    AdoptRule,
    Arrays,
    InnerOptimizer,
    MergeRule,
    OuterOptimizer,
    TileCodec,
    Weighting,
)
from diloco_jax.core.merging import Encoded, merge_piece, recovered, start
from diloco_jax.core.tiles import ArrayLike

SHAPES = ((64, 64), (5,))
"""Shapes of the pieces: of four tiles, and of one."""
TILES = (3, 40)
ISLANDS = 3
WEIGHTS = [1.0 + island for island in range(ISLANDS)]
PARTS = 3
"""Parts of the first shape that are tried by themselves, elements so far apart."""
MOMENTUM = 0.5
OUTER_STEPS = 2
ROUNDING = 1e-4
"""Relative difference of two results that are equal but for rounding."""
ADOPT_FACTS = ("adopts_first", "keeps_pending", "loses_steps")
MERGE_KINDS = ("sum", "elementwise", "whole")


def check_weighting(weighting: Weighting) -> None:
    """Raise an error that describes the fault of the weighting, if it has one."""
    for tokens, steps in ((1, 1), (600, 3), (10**12, 10**6)):
        found = weighting(tokens, steps)
        if not isinstance(found, int | float) or not 0 < found < math.inf:
            raise ValueError(
                f"it gives {found!r} to a delta of {tokens} tokens in {steps} steps; a "
                f"weight is a finite number above 0"
            )


def check_adopt_rule(rule: AdoptRule) -> None:
    """Raise an error that describes the fault of the rule, if it has one."""
    for fact in ADOPT_FACTS:
        if not isinstance(found := getattr(rule, fact, None), bool):
            raise ValueError(
                f"{fact} = {found!r}; an adopt rule is an object that says True or "
                f"False of it: make one of a class derived from "
                f"diloco_jax.core.families.AdoptRule"
            )
    local, base, anchor = _drawn(3, 4, 6)
    _require("adopt", adopt(rule, local, base, anchor, 0.5), "local values", local)


def check_codec(codec: TileCodec) -> None:
    """Raise an error that describes the fault of the codec, if it has one."""
    count, elements = TILES
    nbytes = codec.tile_bytes(elements)
    if not isinstance(nbytes, int) or nbytes < 1:
        raise ValueError(f"tile_bytes({elements}) = {nbytes!r}; it must be an int > 0")
    tiles, wanted = jnp.asarray(_drawn(*TILES)), np.empty((count, nbytes), np.uint8)
    octets = jax.jit(codec.encode)(tiles)
    _require(f"encode with tile_bytes = {nbytes}", octets, "tiles", tiles, wanted)
    decoded = jax.jit(codec.decode, static_argnums=1)(octets, elements)
    _require("decode", decoded, "octets", octets, tiles)
    bad = codec.decode(codec.encode(tiles.at[0, 1].set(jnp.nan)), elements)
    if np.isfinite(bad[0]).all():
        raise ValueError(
            "a NaN is not seen after decode; it must stay one, or infinite"
        )


def check_merge_rule(rule: MergeRule) -> None:
    """Raise an error that describes the fault of the rule, if it has one."""
    needs = getattr(rule, "needs", None)
    if needs not in MERGE_KINDS:
        raise ValueError(
            f"needs = {needs!r}; a merge rule is an object whose `needs` is one of "
            f"{', '.join(MERGE_KINDS)}: make one of a class in diloco_jax.core.families"
        )
    for shape in SHAPES:
        state = start(rule, shape)
        like = jax.tree.map(jnp.shape, state)
        for islands, scale in ((ISLANDS, 1), (ISLANDS, 0), (1, 1), (1, 0)):
            deltas = Encoded.of(list(_drawn(islands, *shape) * np.float32(scale)))
            weights = WEIGHTS[:islands]
            merged = merge_piece(rule, deltas, weights, 0.5, state)
            if not np.isfinite(merged.delta).all():
                raise ValueError(
                    "it made numbers that are not finite of finite deltas, which may "
                    "be zero"
                )
            whole = merge_piece(rule, deltas, weights, 1.0, state)
            if scale and np.array_equal(merged.delta, whole.delta):
                raise ValueError(
                    "it makes the same of deltas that are a share of 0.5 of all "
                    "islands' as of all; what it makes must be as much shorter: "
                    "multiply it by `share`"
                )
            state = merged.state
            if (found := jax.tree.map(jnp.shape, state)) != like:
                raise ValueError(
                    f"a merge makes a state of shapes {found} of one of {like}; it "
                    f"must keep its structure"
                )
    if rule.by_element and not merges_bands_alike(rule):
        raise ValueError(
            "it has by_element = True, but what it makes of an element depends on "
            "other elements too, or on the shape: bands of a piece are merged "
            "otherwise than the whole; set by_element = False, in a rule that sees "
            "whole pieces (needs = 'whole')"
        )


def merges_bands_alike(rule: MergeRule) -> bool:
    """Tell whether merging parts of a piece gives the same result as merging it whole.

    It tries two merges with a crash in between.
    """
    shape = SHAPES[0]
    # The ratio of the islands' lengths differs from row to row.
    lengths = 10.0 ** np.outer(np.arange(ISLANDS), np.linspace(0, 1, shape[0]))
    deltas = (_drawn(ISLANDS, *shape) * lengths[..., None]).astype(np.float32)
    whole = _merged(rule, deltas)
    parts = [(..., slice(n, None, PARTS), slice(n, None, PARTS)) for n in range(PARTS)]
    return all(
        equal_but_for_rounding(_merged(rule, deltas[part]), whole[part])
        for part in parts
    )


def _merged(
    rule: MergeRule, deltas: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Return what two merges of these deltas make: f32[2, *shape]."""
    own, state, found = Encoded.of(list(deltas)), start(rule, deltas.shape[1:]), []
    for _ in range(2):
        merged = merge_piece(rule, own, WEIGHTS, 0.5, state)
        found.append(merged.delta)
        state = recovered(rule, merged.state, merged.delta)
    return np.stack(found)


def check_inner_optimizer(optimizer: InnerOptimizer) -> None:
    """Raise an error that describes the fault of the optimizer, if it has one; those of
    optax are tried with the run's arguments alone."""
    if inner.RATE not in inspect.signature(optimizer).parameters:
        raise ValueError(f"it takes no {inner.RATE}")
    if not optimizer.__module__.startswith("optax."):
        inner.try_steps(optimizer(learning_rate=1.0), 1.0)


def check_outer_optimizer(optimizer: OuterOptimizer) -> None:
    """Raise an error that describes the fault of the optimizer, if it has one."""
    tx = optimizer(MOMENTUM)
    if not isinstance(tx, optax.GradientTransformation):
        raise ValueError(
            f"it returned {type(tx).__name__}; it must return an "
            f"optax.GradientTransformation"
        )
    theta = tuple(jnp.asarray(_drawn(*shape)) for shape in SHAPES)
    state = tx.init(theta)
    for _ in range(OUTER_STEPS):
        updates, after = jax.jit(tx.update)(theta, state, theta)
        for update, delta in zip(updates, theta, strict=True):
            _require("its update", update, "a delta", delta)
        if jax.tree.map(jnp.shape, after) != jax.tree.map(jnp.shape, state):
            raise ValueError("its state changes its structure from step to step")
        state = after
    claims = getattr(optimizer, "elementwise", False)
    if claims and not steps_tiles_alike(optimizer):
        raise ValueError(
            "it has elementwise = True, but its update of an element depends on other "
            "elements too, or on the shape: tiles of a fragment, one by one, are "
            "updated otherwise than the whole; leave elementwise out, and it is given "
            "whole fragments"
        )


def steps_tiles_alike(optimizer: OuterOptimizer) -> bool:
    """Tell whether stepping parts of a fragment gives the same result as stepping it
    whole.

    It compares the new parameters and, if the optimizer has `delta_of`, the deltas that
    it finds.
    """
    rng = np.random.default_rng(0)
    # Rows differ in length, so that what is scaled by a length differs.
    lengths = np.logspace(0, 1, SHAPES[0][0])[:, None], np.ones(())
    given = [
        tuple(
            jnp.asarray(rng.standard_normal(shape) * length, jnp.float32)
            for shape, length in zip(SHAPES, lengths, strict=True)
        )
        for _ in range(1 + OUTER_STEPS)
    ]
    whole = _results(optimizer, given)
    return all(
        equal_but_for_rounding(found, wanted.reshape(-1)[n::PARTS])
        for n in range(PARTS)
        for (found,), (wanted, *_) in zip(
            _results(optimizer, [(x.reshape(-1)[n::PARTS],) for x, *_ in given]),
            whole,
            strict=True,
        )
    )


def _results(optimizer: OuterOptimizer, given: Sequence[Arrays]) -> list[Arrays]:
    """Return the updates of each step, and the deltas that are found for them. given:
    parameters, then a delta for each step."""
    tx, (theta, *deltas) = optimizer(MOMENTUM), given
    state, results = tx.init(theta), []
    for delta in deltas:
        updates, after = tx.update(delta, state, theta)
        results.append(updates)
        if delta_of := getattr(optimizer, "delta_of", None):
            results.append(delta_of(updates, state, MOMENTUM))
        state = after
    return results


def _drawn(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _require(
    what: str,
    found: ArrayLike,
    of: str,
    given: ArrayLike,
    wanted: ArrayLike | None = None,
) -> None:
    """Raise ValueError unless what a member made has shape and dtype of another array,
    by default what it was made of, and only finite numbers."""
    wanted = given if wanted is None else wanted
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        raise ValueError(
            f"{what} made {found.dtype}{list(found.shape)} of {of}, "
            f"{given.dtype}{list(given.shape)}; it must make "
            f"{wanted.dtype}{list(wanted.shape)}"
        )
    if not np.isfinite(found).all():
        raise ValueError(f"{what} made numbers that are not finite of finite ones")


def equal_but_for_rounding(found: ArrayLike, wanted: ArrayLike) -> bool:
    """Tell whether two arrays of one shape are equal but for rounding.

    Each element may differ by `ROUNDING` times itself or the largest element.
    """
    most = float(np.abs(wanted).max())
    return bool(np.allclose(found, wanted, ROUNDING, ROUNDING * most))
