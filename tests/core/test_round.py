"""The oracle against what can be known without it."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import RoundIsland, RoundResult, RoundSettings, run
from pieces import to_pieces

from diloco_jax.core.fragments import (
    Bands,
    FragmentPlan,
    Params,
    from_pieces,
    plan_fragments,
)
from diloco_jax.core.outer import OuterSettings

AXES = {
    "embed": ("vocab", "embed"),
    "w": ("layers", "embed", "embed"),
    "bias": ("embed",),
}
SHAPES = {"embed": (8, 8), "w": (2, 8, 8), "bias": (8,)}
PLAN = plan_fragments(SHAPES, AXES, 3)
SGD = OuterSettings(optimizer="sgd", learning_rate=1.0)
NESTEROV = OuterSettings(optimizer="nesterov", learning_rate=0.7, momentum=0.9)
H = 8
TICKS = 3 * len(PLAN.fragments)  # three cycles


def initial() -> Params:
    rng = np.random.default_rng(0)
    return {
        name: 0.3 * rng.standard_normal(shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def loss(params: Params, token: jax.Array, target: jax.Array) -> jax.Array:
    x = params["embed"][token]
    for layer in range(2):
        x = jnp.tanh(x @ params["w"][layer])
    return jnp.mean((x + params["bias"][None] - target) ** 2)


@jax.jit
def _train(
    carry: tuple[jax.Array, jax.Array], params: Params, steps: int
) -> tuple[tuple[jax.Array, jax.Array], Params]:
    """SGD; the carry is (seed, steps done), which is also the place in the data."""

    def step(i: jax.Array, params: Params) -> Params:
        key = jax.random.fold_in(jax.random.key(carry[0]), carry[1] + i)
        token = jax.random.randint(key, (4,), 0, 8)
        target = jax.random.normal(key, (4, 8))
        grads = jax.grad(loss)(params, token, target)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return (carry[0], carry[1] + steps), jax.lax.fori_loop(0, steps, step, params)


def islands(*seeds: int, tokens: Sequence[int] = (32, 32, 32)) -> list[RoundIsland]:
    """One island per seed of its data."""
    return [
        RoundIsland("abc"[i], (jnp.int32(seed), jnp.int32(0)), _train, tokens[i])
        for i, seed in enumerate(seeds)
    ]


def rounds(
    members: Sequence[RoundIsland],
    ticks: int = TICKS,
    plan: FragmentPlan = PLAN,
    **fields,
) -> RoundResult:
    settings = RoundSettings(**{"steps_per_cycle": H, "outer": SGD, **fields})
    return run(initial(), plan, members, settings, ticks)


def theta(result: RoundResult) -> dict[str, np.ndarray]:
    names = [[piece.name for piece in fragment] for fragment in PLAN.fragments]
    return {
        name: np.asarray(array)
        for fragment, arrays in zip(names, result.theta, strict=True)
        for name, array in zip(fragment, arrays, strict=True)
    }


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Relative norm of the difference at most 1e-5, piece by piece."""
    assert set(ours) == set(theirs)
    for name, expected in theirs.items():
        difference = np.linalg.norm(np.asarray(ours[name]) - np.asarray(expected))
        assert difference <= 1e-5 * np.linalg.norm(expected), name


@pytest.mark.parametrize(
    ("adopt", "overlap"), [("rebase", 0), ("overwrite", 0), ("rebase", 5)]
)
def test_one_island_with_plain_outer_step_is_plain_training(
    adopt: str, overlap: int
) -> None:
    result = rounds(islands(1), adopt=adopt, overlap_steps=overlap)
    _, plain = _train((jnp.int32(1), jnp.int32(0)), initial(), 3 * H)
    assert_same(to_pieces(PLAN, result.local["a"]), to_pieces(PLAN, plain))
    last = PLAN.fragments[-1]
    expected = {p.name: to_pieces(PLAN, plain)[p.name] for p in last}
    if not overlap:
        assert_same({name: theta(result)[name] for name in expected}, expected)


@pytest.mark.parametrize("adopt", ["keep", "blend"])
def test_bands_of_one_fragment_are_merged_and_adopted_as_the_whole(adopt: str) -> None:
    """All at one tick, in plans that differ in nothing but the bands."""
    whole = plan_fragments(SHAPES, AXES, 1)
    embed = next(piece for piece in whole.pieces if piece.name == "embed")
    bands = Bands(axis=-2, stripes=2, rows=1)
    cut = [
        dataclasses.replace(embed, band=band, bands=bands, shape=shape)
        for band, shape in enumerate(bands.shapes(embed.shape))
    ]
    banded = FragmentPlan(((*(p for p in whole.pieces if p != embed), *cut),))
    assert len(cut) == 4
    fields = {"adopt": adopt, "overlap_steps": 2, "outer": NESTEROV}
    ours, theirs = (
        rounds(islands(1, 2), ticks=3, plan=plan, **fields) for plan in (banded, whole)
    )
    for plan, result in ((banded, ours), (whole, theirs)):
        named = zip(plan.pieces, result.theta[0], strict=True)
        merged = from_pieces(plan, {piece.name: x for piece, x in named})
        result.local["merged"] = merged
    assert jax.tree.all(jax.tree.map(np.array_equal, ours.local, theirs.local))


def test_adopt_rules_agree_without_overlap() -> None:
    results = [
        rounds(islands(1, 2, 3), outer=NESTEROV, **rule)
        for rule in (
            {"adopt": "rebase"},
            {"adopt": "overwrite"},
            {"adopt": "blend", "blend_alpha": 0.0},
        )
    ]
    for result in results[1:]:
        assert_same(theta(result), theta(results[0]))
        for name in "abc":
            ours, theirs = result.local[name], results[0].local[name]
            assert_same(to_pieces(PLAN, ours), to_pieces(PLAN, theirs))
