"""The chunked cross entropy is the plain one, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.models.model import Layout
from diloco_jax.models.transformer import positions_at_a_time, token_losses

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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_loss_is_that_of_the_target(dtype):
    x, table, targets, _ = arguments()
    x, table = jnp.asarray(x, dtype), jnp.asarray(table, dtype)
    logits = np.asarray(x, np.float64) @ np.asarray(table, np.float64)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = -np.log(np.take_along_axis(shares, targets[..., None], -1))[..., 0]
    for chunk in (0, 4):
        found = token_losses(x, table, targets, chunk, LAYOUT)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


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


def test_small_vocabularies_are_done_at_once_and_large_ones_in_half_a_gibibyte():
    assert positions_at_a_time(256) > 100_000
    assert positions_at_a_time(262_144) * 262_144 * 4 == 1 << 29
