"""The inner step: accumulation, meshes, bad gradients."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import AbstractMesh, NamedSharding

from diloco_jax.config import ConfigError, IslandConfig
from diloco_jax.core.inner import make_inner
from diloco_jax.data.source import TOKENS, Field
from diloco_jax.island.device.mesh import (
    MESH_AXES,
    make_mesh,
    param_shardings,
    replicated,
    shardings_like_params,
)
from diloco_jax.island.device.step import Trainer, TrainState, unless
from diloco_jax.models import transformer
from diloco_jax.models.model import Model, split_batch, weighted_loss
from diloco_jax.models.presets import preset


def linear_model() -> Model:
    """A bigram table: compiles at once, and its gradient is exact to write down."""

    def init(key):
        return {"table": jax.random.normal(key, (256, 256), jnp.float32)}

    def loss(params, batch):
        inputs, targets, weights = split_batch(batch)
        logits = params["table"][inputs]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        mean = jnp.sum(losses * weights) / jnp.sum(weights)
        return mean, {"loss": mean, "tokens": jnp.sum(weights)}

    return Model(init, loss, {"table": ("vocab", "embed")})


def make_trainer(model=None, inner=None, **island) -> Trainer:
    config = IslandConfig(**island)
    return Trainer(
        model or linear_model(), inner or optax.sgd(1.0), config, make_mesh(config)
    )


def start(trainer: Trainer) -> TrainState:
    params = trainer.place_params(linear_model().init(jax.random.key(0)))
    return TrainState(params, trainer.init_inner(params))


def rows(batch_size: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"tokens": rng.integers(0, 256, (batch_size, 17)).astype(np.int32)}


def host(tree):
    return jax.tree.map(np.array, tree)


def test_a_step_calls_nothing_deprecated():
    """With PYTHONWARNINGS=error a warning ended the island."""
    trainer = make_trainer(inner=optax.adamw(1e-3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.lower(16)


def test_a_step_is_gradient_descent_scaled_by_the_learning_rate():
    model, trainer = linear_model(), make_trainer()
    state = start(trainer)
    before = host(state.params)
    (loss, _), grads = jax.value_and_grad(model.loss, has_aux=True)(before, rows())
    state, metrics = trainer.step(state, trainer.put_batch(rows()), 0.5)
    np.testing.assert_allclose(
        state.params["table"], before["table"] - 0.5 * grads["table"], atol=1e-6
    )
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(
        metrics["grad_norm"], np.linalg.norm(grads["table"]), rtol=1e-5
    )
    assert float(metrics["skipped"]) == 0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("accumulation", [2, 8])
def test_rounds_are_one_big_batch(accumulation, weighted):
    batch = rows()
    if weighted:
        # Whole rounds of padding among them, which have no mean (NaN).
        weights = np.random.default_rng(1).random((8, 16)).astype(np.float32)
        weights[::accumulation] = 0
        batch["weights"] = weights
    results = []
    for rounds in (1, accumulation):
        trainer = make_trainer(accumulation=rounds)
        state, metrics = trainer.step(start(trainer), trainer.put_batch(batch), 1.0)
        assert float(metrics["skipped"]) == 0
        results.append(host((state.params, metrics)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *results
    )
    expected = weights.sum() if weighted else 8 * 16
    np.testing.assert_allclose(metrics["tokens"], expected, rtol=1e-6)


def test_rounds_with_unlike_places_of_pictures_are_one_big_batch():
    """A model gives these places no weight, and no array of a batch says so."""
    place, results = 255, []

    def loss(params, batch):
        weights = (batch["tokens"][:, 1:] != place).astype(jnp.float32)
        return linear_model().loss(params, {**batch, "weights": weights})

    batch = rows()
    batch["tokens"][::2, 3:] = place
    batch["pictures"] = np.zeros((8, 1, 2, 2, 3), np.uint8)
    for rounds in (1, 2):
        model = linear_model()._replace(loss=loss)
        trainer = make_trainer(model, accumulation=rounds)
        state, metrics = trainer.step(start(trainer), trainer.put_batch(batch), 1.0)
        results.append(host((state.params, metrics)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), *results
    )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_mixtures_step_tells_the_loss_of_each_source(accumulation):
    """As sums over its rows; the step is as it is without them, and compiled once."""
    sources, arrays = 4, ("tokens", "source_number", "weights")
    config = IslandConfig(batch_size=8, accumulation=accumulation)
    weights = np.random.default_rng(1).random((8, 16)).astype(np.float32)
    number = np.array([3, 0, 0, 3, 1, 0, 3, 0], np.int32)
    batch = {**rows(), "weights": weights, "source_number": number}
    plain = linear_model()

    def losses(params, batch):
        inputs, targets, weights = split_batch(batch)
        logits = params["table"][inputs]
        found = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return found, weights

    told = plain._replace(loss=lambda p, batch: weighted_loss(*losses(p, batch)))
    results = []
    for model in (plain, told):
        mesh = make_mesh(config)
        trainer = Trainer(model, optax.sgd(1.0), config, mesh, arrays, "", sources)
        state = start(trainer)
        found, counted = losses(host(state.params), batch)
        by_row = np.stack(((found * counted).sum(1), counted.sum(1)), axis=1)
        state, metrics = trainer.step(state, trainer.put_batch(batch), 1.0)
        results.append(host((state.params, metrics)))
        state, _ = trainer.step(state, trainer.put_batch(batch), 1.0)
        assert tiny.steps_compiled(trainer) == 1
    (params, none), (same, metrics) = results
    np.testing.assert_allclose(params["table"], same["table"], rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(none["by_source"], np.zeros((sources, 2)))
    by_hand = [by_row[number == source].sum(0) for source in range(sources)]
    np.testing.assert_allclose(metrics["by_source"], by_hand, rtol=1e-5)
    loss, weight = metrics["by_source"].sum(0)
    np.testing.assert_allclose(metrics["loss"], loss / weight, rtol=1e-5)


def test_a_model_trains_on_arrays_of_its_own():
    """Pictures, cut into rounds like tokens; what compiles ahead is what runs."""
    picture = Field("uint8", None, (2, 3))
    plain = linear_model()

    def loss(params, batch):
        assert batch["picture"].shape == (4, 2, 3)
        mean, metrics = plain.loss(params, batch)
        light = jnp.mean(batch["picture"].astype(jnp.float32))
        return mean + light * params["table"][0, 0], metrics

    model = plain._replace(loss=loss, batch={"tokens": TOKENS, "picture": picture})
    with pytest.raises(ConfigError, match="the model needs 'picture'"):
        make_trainer(model)
    config = IslandConfig(batch_size=8, accumulation=2)
    arrays, mesh = ("tokens", "picture"), make_mesh(config)
    trainer = Trainer(model, optax.sgd(1.0), config, mesh, arrays)
    lowered = trainer.lower(16)
    assert lowered.args_info[0][1]["picture"].shape == (8, 2, 3)
    batch = {**rows(), "picture": np.full((8, 2, 3), 9, np.uint8)}
    state = start(trainer)
    dark = make_trainer(batch_size=8)
    moved, _ = trainer.step(state, trainer.put_batch(batch), 1.0)
    other, _ = dark.step(start(dark), dark.put_batch(rows()), 1.0)
    difference = host(other.params)["table"] - host(moved.params)["table"]
    np.testing.assert_allclose(difference[0, 0], 9, rtol=1e-5)
    np.testing.assert_allclose(difference.ravel()[1:], 0, atol=1e-6)


def test_a_non_finite_gradient_changes_nothing():
    model = linear_model()

    def loss(params, batch):
        steep = params["table"][0, 0] * jnp.where(batch["tokens"][0, 0] == 1, 1e30, 0.0)
        mean, metrics = model.loss(params, batch)
        return mean + (steep - jax.lax.stop_gradient(steep)), metrics

    trainer = make_trainer(model._replace(loss=loss), optax.adam(1.0))
    state = start(trainer)
    good, bad = rows(), rows()
    good["tokens"][0, 0], bad["tokens"][0, 0] = 0, 1
    state, metrics = trainer.step(state, trainer.put_batch(good), 0.01)
    assert float(metrics["skipped"]) == 0
    before = host(state)
    state, metrics = trainer.step(state, trainer.put_batch(bad), 0.01)
    assert float(metrics["skipped"]) == 1
    assert math.isfinite(float(metrics["loss"]))
    jax.tree.map(np.testing.assert_array_equal, host(state), before)
    state, metrics = trainer.step(state, trainer.put_batch(good), np.float64(0.02))
    assert float(metrics["skipped"]) == 0
    assert tiny.steps_compiled(trainer) == 1, "whatever the learning rate"
    assert np.any(host(state.params)["table"] != before.params["table"])


def test_batches_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match=r"batch_size = 9 .* 1 \* 1 \* 2 = 2"):
        make_trainer(batch_size=9, accumulation=2)


def test_missing_devices_are_refused_with_the_remedy():
    config = IslandConfig(mesh_data=64, mesh_fsdp=2, batch_size=128)
    message = r"64 \* 2 \* 1 \* 1 = 128 devices, .* are \d+; .*device_count=128"
    with pytest.raises(ConfigError, match=message):
        make_mesh(config)


@pytest.mark.parametrize("name", ["lamb", "adafactor", "adopt"])
def test_the_state_of_any_optimizer_is_cut_as_its_parameters(name):
    model = transformer.build(preset("2m"))
    shapes, inner = model.shapes(), make_inner(name, axes=model.axes)
    mesh = AbstractMesh((2, 2, 1, 2), MESH_AXES)
    shardings = param_shardings(mesh, model.axes, shapes)
    whole = replicated(mesh)
    state = jax.eval_shape(inner.init, shapes)
    lies = shardings_like_params(state, shapes, shardings, whole)
    expected = jax.tree.map(lambda s, lie: (s.shape, lie), shapes, shardings)
    cut = [of for of in jax.tree.leaves(expected, is_leaf=is_pair) if of[1] != whole]
    found = jax.tree.map(lambda s, lie: (s.shape, lie), state, lies)
    found = jax.tree.leaves(found, is_leaf=is_pair)
    # Adafactor has one second moment of what is too small to be factored.
    copies = {"lamb": 2, "adafactor": 1, "adopt": 2}[name]
    large = [of for of in cut if name != "adafactor" or not factored(of[0])]
    assert len(large) >= 1
    for of in large:
        assert found.count(of) == copies * cut.count(of)
    assert all(lie == whole for shape, lie in found if not shape)


def is_pair(value):
    return isinstance(value, tuple) and any(isinstance(v, NamedSharding) for v in value)


def factored(shape):
    return len(shape) > 1 and sorted(shape)[-2] >= 128


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("stays", [True, False])
def test_the_tree_stays_or_changes_whole(stays, platform):
    tree = {"a": jnp.arange(4.0), "b": [jnp.int32(3)]}

    def changed(tree):
        return jax.tree.map(lambda x: x * jnp.asarray(2, x.dtype), tree)

    found = jax.jit(
        lambda stays, tree: unless(stays, changed, tree, platform), donate_argnums=1
    )(jnp.asarray(stays), jax.tree.map(jnp.copy, tree))
    wanted = tree if stays else changed(tree)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    wrong = unless(jnp.asarray(True), lambda x: x * jnp.nan, jnp.ones(3), platform)
    np.testing.assert_array_equal(wrong, 1)
