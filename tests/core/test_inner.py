"""Inner optimizers on stacked parameters, the learning rate by the progress of the
run, and losses by source of a mixture."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from family_members import brief, names

from diloco_jax.core.families import INNER_OPTIMIZERS
from diloco_jax.core.inner import (
    by_source,
    learning_rate,
    left_to_adam,
    make_inner,
)

AXES = {
    "embed": ("vocab", "embed"),
    "w": ("layers", "embed", "mlp"),
    "norm": ("layers", "embed"),
}
NAMES = names(INNER_OPTIMIZERS, "inner")


def params() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {"embed": (12, 4), "w": (3, 4, 6), "norm": (3, 4)}
    return {
        n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, s in shapes.items()
    }


def updates(
    tx: optax.GradientTransformation, grads: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    tree = params()
    return jax.jit(tx.update)(grads, tx.init(tree), tree)[0]


@pytest.mark.parametrize("name", NAMES, ids=brief)
def test_updates_go_down_at_rate_1_and_decay_spares_vectors(name: str) -> None:
    grads = jax.tree.map(lambda p: 0.01 * p, params())
    moved = updates(make_inner(name, axes=AXES), grads)
    assert all(float(jnp.vdot(moved[leaf], grads[leaf])) < 0 for leaf in moved)
    if name == "sgd":
        np.testing.assert_array_equal(moved["w"], -grads["w"])
    zeros = jax.tree.map(jnp.zeros_like, params())
    moved = updates(make_inner(name, axes=AXES, weight_decay=0.1), zeros)
    for leaf in ("embed", "w"):
        np.testing.assert_allclose(moved[leaf], -0.1 * params()[leaf], rtol=1e-5)
    np.testing.assert_array_equal(moved["norm"], 0)


def test_muon_orthogonalises_every_layer_for_itself() -> None:
    grads = params()
    muon = make_inner("muon", axes=AXES)
    moved = updates(muon, grads)
    together, embed = moved["w"], np.abs(moved["embed"])
    alone = {**grads, "w": grads["w"].at[1:].set(0)}
    np.testing.assert_allclose(updates(muon, alone)["w"][0], together[0], atol=1e-4)
    spectrum = np.linalg.svd(together, compute_uv=False)
    assert float(spectrum.max() / spectrum.min()) < 2.5
    np.testing.assert_allclose(embed, embed[0, 0], rtol=1e-3)  # Adam's first step


EXPERTS, TALL = (2, 3, 4, 6), (2, 3, 6, 4)
"""Layers, experts in each, and their matrices."""


def stacks() -> dict[str, jax.Array]:
    rng = np.random.default_rng(1)
    shapes = {"up": EXPERTS, "down": TALL, "bias": EXPERTS[:3], "unnamed": EXPERTS[1:]}
    return {
        n: jnp.asarray(rng.standard_normal(s), jnp.float32) for n, s in shapes.items()
    }


def test_muon_takes_a_stack_of_experts_as_so_many_matrices() -> None:
    """Three updates of two stacks are those of their matrices one by one."""
    values = stacks()
    axes = {
        "up": ("layers", "expert", "embed", "mlp"),
        "down": ("layers", "expert", "mlp", "embed"),
    }
    whole = {name: values[name] for name in axes}
    parts = {
        f"{name}-{layer}-{expert}": value[layer, expert]
        for name, value in whole.items()
        for layer, expert in np.ndindex(value.shape[:2])
    }

    def train(tree: dict[str, jax.Array], axes: dict) -> dict[str, jax.Array]:
        tx = make_inner("muon", axes=axes, weight_decay=0.1)
        state, update = tx.init(tree), jax.jit(tx.update)
        for power in (1, 2, 3):
            grads = jax.tree.map(lambda p, n=power: p**n, tree)
            moved, state = update(grads, state, tree)
            tree = jax.tree.map(lambda p, u: p + 0.1 * u, tree, moved)
        return tree

    together = train(whole, axes)
    alone = train(parts, dict.fromkeys(parts, ("embed", "mlp")))
    for name, value in together.items():
        one_by_one = [alone[f"{name}-{i}-{j}"] for i, j in np.ndindex(value.shape[:2])]
        expected = np.reshape(one_by_one, value.shape)
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def test_what_muon_leaves_to_adam_is_named_and_an_experts_vectors_do_not_decay() -> (
    None
):
    axes = {
        "layers": {
            "up": ("layers", "expert", "embed", "mlp"),
            "bias": ("layers", "expert", "mlp"),
            "router": ("layers", "embed", "expert"),
            "query": ("layers", "embed", "heads", "head_dim"),
        },
        "unnamed": (None, "embed", "mlp"),
        "embedding": ("vocab", "embed"),
    }
    assert left_to_adam(axes) == ["embedding", "layers/query", "unnamed"]
    values = {name: stacks()[name] for name in ("bias", "unnamed")}
    named = {"bias": axes["layers"]["bias"], "unnamed": axes["unnamed"]}
    for name in ("muon", "sgd"):
        tx = make_inner(name, axes=named, weight_decay=0.1)
        zeros = jax.tree.map(jnp.zeros_like, values)
        moved = tx.update(zeros, tx.init(values), values)[0]
        np.testing.assert_array_equal(moved["bias"], 0)
        np.testing.assert_allclose(moved["unnamed"], -0.1 * values["unnamed"], 1e-5)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_first_moments_in_bfloat16_take_half_and_change_little(name: str) -> None:
    grads = jax.tree.map(lambda p: 0.01 * p, params())
    moved, sizes = [], []
    for dtype in ("float32", "bfloat16"):
        inner = make_inner(name, axes=AXES, moment_dtype=dtype)
        state = inner.init(params())
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
        moved.append(updates(inner, grads))
    model = sum(leaf.nbytes for leaf in jax.tree.leaves(params()))
    assert sizes[0] - sizes[1] == model / 2
    for a, b in zip(*map(jax.tree.leaves, moved), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.02, atol=0.02)


def test_clipping_bounds_the_gradient() -> None:
    grads = params()
    clipped = updates(make_inner("sgd", axes=AXES, clip_norm=0.5), grads)
    assert float(optax.tree.norm(clipped)) == pytest.approx(0.5, rel=1e-5)
    free = updates(make_inner("sgd", axes=AXES, clip_norm=1e6), grads)
    np.testing.assert_array_equal(free["w"], -grads["w"])


# ---- any other of optax ------------------------------------------------------------


@pytest.mark.parametrize("name", ["adafactor", "lamb", "adopt", "novograd"])
def test_what_optax_names_goes_down_and_spares_vectors(name: str) -> None:
    grads = jax.tree.map(lambda p: 0.01 * p, params())
    moved, decayed = (
        updates(make_inner(name, axes=AXES, weight_decay=decay), grads)
        for decay in (0.0, 0.1)
    )
    for leaf in ("embed", "w"):
        # The first update of "adopt" is none.
        assert name == "adopt" or float(jnp.vdot(moved[leaf], grads[leaf])) < 0
        assert np.any(moved[leaf] != decayed[leaf])
        if name != "lamb":  # whose decay is within its trust ratio
            expected = moved[leaf] - 0.1 * params()[leaf]
            np.testing.assert_allclose(decayed[leaf], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(moved["norm"], decayed["norm"])


def test_our_settings_reach_it() -> None:
    grads = [params(), jax.tree.map(lambda p: p**2, params())]

    def after_two(tx: optax.GradientTransformation) -> dict[str, jax.Array]:
        state = tx.init(params())
        _, state = tx.update(grads[0], state, params())
        return tx.update(grads[1], state, params())[0]

    settings = {"beta1": 0.7, "beta2": 0.8, "moment_dtype": "bfloat16"}
    ours = make_inner("nadam", axes=AXES, arguments=[("eps", 0.1)], **settings)
    plain = optax.nadam(1.0, b1=0.7, b2=0.8, eps=0.1, mu_dtype="bfloat16")
    jax.tree.map(np.testing.assert_array_equal, *map(after_two, (ours, plain)))
    momentum = make_inner("sgd", axes=AXES, arguments=[("momentum", 0.5)])
    expected = jax.tree.map(lambda a, b: -(0.5 * a + b), *grads)
    jax.tree.map(np.testing.assert_array_equal, after_two(momentum), expected)


@pytest.mark.parametrize(
    ("name", "arguments", "what"),
    [
        ("adamx", (), r"'adamx' is no .* you mean 'adamax'"),
        ("clip", (), "'clip' is no optimizer of optax"),
        ("scale_by_adam", (), "is no optimizer of optax"),
        ("sgd", (("momentm", 0.9),), "momentm = 0.9, .* you mean 'momentum'"),
        ("adamw", (("b1", 0.8),), r"b1 = 0.8, but inner\.beta1 says that"),
        ("lamb", (("learning_rate", 1.0),), r"but inner\.learning_rate says that"),
        ("muon", (("beta", 0.8),), "beta = 0.8, but another field says that"),
        ("adafactor", (("momentum", "much"),), "'adafactor' with .*much.*TypeError"),
        ("dpsgd", (), "'dpsgd' needs l2_norm_clip, noise_multiplier, seed"),
        ("momo", (), "makes no updates from gradients, state and parameters .*value"),
        ("fromage", (), "the learning rate is more than a factor of the updates"),
        ("schedule_free_sgd", (), "more than a factor of the updates"),
    ],
)
def test_what_does_not_fit_is_refused(
    name: str, arguments: tuple[tuple[str, float | str], ...], what: str
) -> None:
    with pytest.raises(ValueError, match=what):
        make_inner(name, axes=AXES, arguments=arguments)


def no_rate(beta: float) -> optax.GradientTransformation:
    return optax.ema(beta)


def turns(learning_rate: float) -> optax.GradientTransformation:
    del learning_rate
    return optax.stateless(lambda g, _: jax.tree.map(jnp.transpose, g))


@pytest.mark.parametrize(
    ("name", "what"),
    [("no_rate", "it takes no learning_rate"), ("turns", r"line \d+: \w+Error")],
)
def test_one_of_your_own_that_does_not_fit_is_refused(name: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        INNER_OPTIMIZERS.check(f"{__file__}:{name}")


def test_a_dtype_that_it_gives_no_choice_of_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'bfloat16', but .* \['dtype_momentum'\]"):
        make_inner("adafactor", axes=AXES, moment_dtype="bfloat16")


@dataclasses.dataclass(frozen=True)
class Settings:
    learning_rate: float = 2.0
    schedule: str = "cosine"
    warmup_fraction: float = 0.1
    final_fraction: float = 0.25


@pytest.mark.parametrize(
    ("progress", "expected"),
    [(-1, 0), (0, 0), (0.05, 1), (0.1, 2), (0.55, 1.25), (1, 0.5), (2, 0.5)],
)
def test_rate_by_progress(progress: float, expected: float) -> None:
    assert learning_rate(Settings(), progress) == pytest.approx(expected)
    half = learning_rate(Settings(), progress, rewarm=0.5)
    assert half == pytest.approx(expected / 2)


def test_a_constant_rate_stays_and_an_unknown_course_is_refused() -> None:
    flat = Settings(schedule="constant", warmup_fraction=0.0)
    assert learning_rate(flat, 0.0) == learning_rate(flat, 1.0) == 2.0
    with pytest.raises(ValueError, match=r"inner\.schedule = 'linear'"):
        learning_rate(Settings(schedule="linear"), 0.5)


def test_sums_are_those_of_numpy():
    rng = np.random.default_rng(0)
    sources = rng.integers(0, 7, 64).astype(np.int32)
    rows = rng.random((2, 64)).astype(np.float32)
    sums = jax.jit(by_source, static_argnums=3)(sources, *rows, 7)
    by_hand = [[row[sources == n].sum() for row in rows] for n in range(7)]
    np.testing.assert_allclose(sums, by_hand, rtol=1e-6)
