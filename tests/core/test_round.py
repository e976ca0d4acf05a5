"""The oracle against what can be known without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import RoundIsland, RoundSettings, run
from pieces import to_pieces

from diloco_jax.core.fragments import Params, plan_fragments
from diloco_jax.core.outer import OuterSettings

AXES = {
    "embed": ("vocab", "embed"),
    "w": ("layers", "embed", "embed"),
    "bias": ("embed",),
}
SHAPES = {"embed": (8, 8), "w": (2, 8, 8), "bias": (8,)}
PLAN = plan_fragments(SHAPES, AXES, 3)
SGD = OuterSettings(optimizer="sgd", learning_rate=1.0)
H = 8


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


@pytest.mark.parametrize(
    ("adopt", "overlap"), [("rebase", 0), ("overwrite", 0), ("rebase", 5)]
)
def test_one_island_with_plain_outer_step_is_plain_training(
    adopt: str, overlap: int
) -> None:
    """Its own values after three cycles, and those of the last merge."""
    alone = RoundIsland("a", (jnp.int32(1), jnp.int32(0)), _train, 32)
    chosen = RoundSettings(
        steps_per_cycle=H, outer=SGD, adopt=adopt, overlap_steps=overlap
    )
    result = run(initial(), PLAN, [alone], chosen, 3 * len(PLAN.fragments))
    _, plain = _train((jnp.int32(1), jnp.int32(0)), initial(), 3 * H)
    wanted, found = to_pieces(PLAN, plain), to_pieces(PLAN, result.local["a"])
    last = [] if overlap else zip(PLAN.fragments[-1], result.theta[-1], strict=True)
    for name, values in [*found.items(), *((piece.name, x) for piece, x in last)]:
        difference = np.linalg.norm(np.asarray(values) - np.asarray(wanted[name]))
        assert difference <= 1e-5 * np.linalg.norm(wanted[name]), name
