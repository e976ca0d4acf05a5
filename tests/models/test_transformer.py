"""The transformer: what it may see, how big it is, and what must not change it; its
chunked cross entropy and its noise by blocks, in less memory."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.config import ConfigError, ModelConfig, RunConfig
from diloco_jax.config.config import LANES
from diloco_jax.core.fragments import get_piece
from diloco_jax.models import transformer
from diloco_jax.models.build import build, build_plan
from diloco_jax.models.layers import ATTENTION
from diloco_jax.models.model import Layout
from diloco_jax.models.presets import PRESETS, preset
from diloco_jax.models.transformer import positions_at_a_time, token_losses

TINY = preset("tiny")
VARIANTS = {
    "grouped": TINY,
    "one_kv_head_tied": dataclasses.replace(TINY, num_kv_heads=1, tied_embeddings=True),
}


@pytest.fixture(params=list(VARIANTS))
def config(request) -> ModelConfig:
    return VARIANTS[request.param]


@functools.cache
def tokens(seed: int = 0) -> np.ndarray:
    shape = (2, 17)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.int32)


@functools.cache
def init(config: ModelConfig):
    """Parameters with every norm and logit away from where it starts."""
    params = transformer.build(config).init(jax.random.key(0))
    return jax.tree.map(
        lambda p: p + 0.05 * np.sin(np.arange(p.size)).reshape(p.shape), params
    )


def grads(model, config: ModelConfig = TINY):
    return jax.jit(jax.value_and_grad(model.loss, has_aux=True))(
        init(config), {"tokens": tokens()}
    )


@functools.cache
def plain_grads(config: ModelConfig = TINY):
    return grads(transformer.build(config), config)


def temporary_bytes(model, batch: tuple[int, int]) -> int:
    """Return the memory of a gradient besides parameters, batch and results."""
    grad = jax.jit(jax.grad(model.loss, has_aux=True))
    tokens = jax.ShapeDtypeStruct(batch, jnp.int32)
    compiled = grad.lower(model.shapes(), {"tokens": tokens})
    return compiled.compile().memory_analysis().temp_size_in_bytes


def relative_difference(a, b) -> float:
    a, b = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_weights_choose_what_counts():
    model = transformer.build(TINY)
    params = init(TINY)
    weights = np.zeros((2, 16), np.float32)
    weights[0] = 1.0
    loss = jax.jit(model.loss)
    masked, metrics = loss(params, {"tokens": tokens(), "weights": weights})
    first, _ = loss(params, {"tokens": tokens()[:1]})
    np.testing.assert_allclose(masked, first, rtol=1e-5)
    assert float(metrics["tokens"]) == 16
    nothing, _ = loss(params, {"tokens": tokens(), "weights": 0 * weights})
    assert float(nothing) == 0


@pytest.mark.parametrize("remat", ["full", "dots", "attention"])
def test_remat_changes_no_gradient(remat):
    again = grads(transformer.build(TINY, remat=remat))
    assert relative_difference(again, plain_grads()) < 1e-5


def test_remat_keeps_what_its_name_says():
    kept = {
        remat: temporary_bytes(
            transformer.build(dataclasses.replace(TINY, num_layers=9), remat=remat),
            batch=(4, 257),
        )
        for remat in ("none", "dots", "attention", "full")
    }
    assert kept["none"] > kept["dots"] > kept["attention"] > kept["full"]


def test_bfloat16_is_close_and_gradients_stay_f32():
    low, plain = grads(transformer.build(TINY, compute_dtype="bfloat16")), plain_grads()
    assert 1e-5 < relative_difference(low[1], plain[1]) < 0.05
    assert abs(float(low[0][0]) - float(plain[0][0])) < 0.02
    assert {leaf.dtype for leaf in jax.tree.leaves(low)} == {jnp.dtype("float32")}


def test_the_gradient_of_a_common_token_is_as_exact_in_bfloat16():
    """Each row's is a sum over 2,000 tokens."""
    config = dataclasses.replace(TINY, num_layers=1)
    few = np.random.default_rng(0).integers(0, 4, (16, 513)).astype(np.int32)
    low, plain = (
        jax.jit(jax.grad(transformer.build(config, compute_dtype=dtype).loss, 0, True))
        for dtype in ("bfloat16", "float32")
    )
    params = transformer.build(config).init(jax.random.key(0))
    batch = {"tokens": few}
    found, expected = (grad(params, batch)[0]["embedding"] for grad in (low, plain))
    assert relative_difference(found, expected) < 0.03


def test_scanned_and_unrolled_layers_agree(monkeypatch):
    monkeypatch.setattr(transformer, "UNROLLED_LAYERS", 0)
    scanned = grads(transformer.build(TINY))
    monkeypatch.undo()
    assert relative_difference(scanned, plain_grads()) < 1e-5


def test_every_tensor_has_named_axes_and_a_gradient(config):
    model = transformer.build(config)
    params = init(config)
    axes = jax.tree.leaves(model.axes, is_leaf=lambda x: isinstance(x, tuple))
    leaves = jax.tree.leaves(params)
    assert [len(names) for names in axes] == [leaf.ndim for leaf in leaves]
    sizes = {
        "layers": config.num_layers,
        "vocab": config.vocab_size,
        "embed": config.d_model,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "mlp": config.mlp_dim,
    }
    for names, leaf in zip(axes, leaves, strict=True):
        assert tuple(sizes[name] for name in names) == leaf.shape
    for gradient in jax.tree.leaves(plain_grads(config)[1]):
        assert float(jnp.max(jnp.abs(gradient))) > 0
    assert ("unembedding" in params) != config.tied_embeddings


@pytest.mark.parametrize("layers", [2, 6])
def test_what_adds_to_the_stream_starts_smaller_the_more_there_is_of_it(layers):
    config = dataclasses.replace(TINY, num_layers=layers)
    stacks = transformer.build(config).init(jax.random.key(0))["layers"]
    additions = 2 * layers
    output, down = stacks["attention"]["output"], stacks["mlp"]["down"]
    assert abs(np.corrcoef(down[0].ravel(), down[1].ravel())[0, 1]) < 0.1
    inputs = config.num_heads * config.head_dim
    assert np.std(output) == pytest.approx((inputs * additions) ** -0.5, rel=0.05)
    assert np.std(down) == pytest.approx((config.mlp_dim * additions) ** -0.5, rel=0.05)


def parameters(name: str) -> int:
    shapes = jax.tree.leaves(transformer.build(preset(name)).shapes())
    return sum(math.prod(leaf.shape) for leaf in shapes)


@pytest.mark.parametrize("name", [n for n in PRESETS if n[0].isdigit()])
def test_presets_have_the_size_of_their_name(name):
    size = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
    assert abs(parameters(name) / size - 1) < 0.15
    assert name != "12b" or parameters(name) == 11_765_395_200


def test_an_unknown_preset_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean '100m'"):
        preset("1000m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 15}, "model.head_dim = 15"),
        ({"num_kv_heads": 3}, "model.num_heads = 4 .* model.num_kv_heads = 3"),
        ({"vocab_size": 100}, "model.vocab_size = 100.* at least 256"),
    ],
)
def test_bad_models_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        transformer.build(dataclasses.replace(TINY, **change))


LAYOUT = Layout.of_one_device()
B, T, D, V = 2, 21, 8, 50


def sums(chunk: int):
    def loss(x, table, targets, weights):
        return jnp.sum(token_losses(x, table, targets, chunk, LAYOUT) * weights)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def arguments():
    random = np.random.default_rng(0)
    return (
        3 * random.normal(size=(B, T, D)).astype(np.float32),
        random.normal(size=(D, V)).astype(np.float32),
        random.integers(0, V, (B, T)).astype(np.int32),
        random.random((B, T)).astype(np.float32),
    )


@pytest.mark.parametrize("chunk", [1, 5, 7, 20, 21, 64])
def test_chunks_change_neither_losses_nor_gradients(chunk):
    x, table, targets, _ = arguments()
    plain = token_losses(x, table, targets, 0, LAYOUT)
    chunked = token_losses(x, table, targets, chunk, LAYOUT)
    np.testing.assert_allclose(chunked, plain, rtol=1e-5, atol=1e-6)
    for a, b in zip(
        jax.tree.leaves(sums(chunk)(*arguments())),
        jax.tree.leaves(sums(0)(*arguments())),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_logits_of_a_large_vocabulary_never_stand_whole():
    batch, length, words, chunk = 2, 512, 1 << 16, 16
    shapes = (
        jax.ShapeDtypeStruct((batch, length, D), jnp.float32),
        jax.ShapeDtypeStruct((D, words), jnp.float32),
        jax.ShapeDtypeStruct((batch, length), jnp.int32),
        jax.ShapeDtypeStruct((batch, length), jnp.float32),
    )

    def temporary_bytes(chunk: int) -> int:
        compiled = sums(chunk).lower(*shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * batch * length * words
    assert temporary_bytes(0) > logits
    assert temporary_bytes(chunk) < logits / 8
    assert positions_at_a_time(262_144) * 262_144 * 4 == 1 << 29


@pytest.mark.parametrize(
    ("count", "generator"),
    [(1, None), (256, None), (257, None), (4096, None), (1000, "rbg")],
)
def test_the_values_are_those_of_jax(monkeypatch, count, generator):
    monkeypatch.setattr(transformer, "NOISE_BLOCK", 256)
    key = jax.random.key(7, impl=generator)
    drawn = jax.jit(transformer.normal, static_argnums=1)(key, count)
    alike = jax.jit(lambda key: jax.random.normal(key, (count,)))(key)
    np.testing.assert_array_equal(drawn, alike)


@pytest.mark.parametrize("tied", [True, False])
def test_a_layer_that_is_drawn_alone_has_the_same_values(monkeypatch, tied):
    """A worker draws no more than it has."""
    config = dataclasses.replace(preset("tiny"), tied_embeddings=tied)
    run, key = RunConfig(model=config), jax.random.key(3)
    monkeypatch.setattr(transformer, "NOISE_BLOCK", 1 << 10)
    made = build(run)
    at_once = jax.jit(made.init)(key)
    drawn = made.draw(key)
    assert not isinstance(drawn["layers"]["mlp"]["up"], jax.Array)
    for piece in build_plan(run, made).pieces:
        np.testing.assert_array_equal(
            get_piece(drawn, piece), get_piece(at_once, piece)
        )


def test_values_beyond_the_reach_of_32_bits_have_indices_of_their_own():
    blocks = 2**32 // transformer.NOISE_BLOCK
    for index, high in ((blocks - 1, 0), (blocks, 1), (2 * blocks + 3, 2)):
        upper, lower = transformer.counters(jnp.uint32(index))
        assert set(np.unique(upper)) == {high}
        first = index * transformer.NOISE_BLOCK - high * 2**32
        assert (int(lower[0]), int(lower[-1])) == (
            first,
            first + transformer.NOISE_BLOCK - 1,
        )


def test_memory_holds_little_more_than_the_values():
    """As in jax at once it would be four times as much."""
    count = 1 << 25
    draw = jax.jit(transformer.normal, static_argnums=1)
    memory = draw.lower(jax.random.key(0), count).compile().memory_analysis()
    held = memory.temp_size_in_bytes + memory.output_size_in_bytes
    assert held < 1.2 * 4 * count


# ---- attention: the kernel for TPUs, interpreted here, and the plain formula ---------


def heads_of(length: int):
    random = np.random.default_rng(0)
    return [
        random.normal(size=(2, length, n, 16)).astype(np.float32) for n in (4, 2, 2)
    ]


@pytest.mark.parametrize("window", [0, 1, 100, 129])
def test_kernel_and_formula_agree_with_their_gradients(window):
    # Three blocks, so that some are masked whole, some in part.
    found = []
    for name in ("splash", "dot_product"):
        attend = functools.partial(ATTENTION[name], LAYOUT, window=window)

        def loss(*parts, attend=attend):
            mixed = attend(*parts)
            return jnp.sum(mixed * jnp.cos(jnp.arange(mixed.size).reshape(mixed.shape)))

        grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        found.append(jax.tree.leaves(grad(*heads_of(3 * LANES))))
    for kernel, formula in zip(*found, strict=True):
        np.testing.assert_allclose(kernel, formula, rtol=1e-3, atol=1e-4)


def test_auto_is_the_formula_where_there_is_no_tpu():
    parts = heads_of(LANES)
    made = [
        str(jax.make_jaxpr(functools.partial(ATTENTION[name], LAYOUT))(*parts))
        for name in ("auto", "dot_product")
    ]
    assert made[0] == made[1]


def test_lengths_that_the_kernel_cannot_cut_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"sequence_length = 100: .* multiple of 128"):
        ATTENTION["splash"](LAYOUT, *heads_of(100))
