"""Documents packed into one row are trained on as if each were alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_families import loaded

from diloco_jax.config.config import LANES
from diloco_jax.models import transformer
from diloco_jax.models.model import split_batch

T = LANES
ROWS = ((60, 40, 29), (2, 77))
"""Tokens of the documents in each row of T + 1; the second row ends in padding."""
NAMES = ("llama3", "qwen3", "gemma3")


def documents(vocabulary: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    lengths = [length for row in ROWS for length in row]
    return [random.integers(0, vocabulary, n).astype(np.int32) for n in lengths]


def packed(vocabulary: int) -> dict[str, np.ndarray]:
    """All documents in the rows; weights that differ, and are left out of padding."""
    tokens = np.zeros((len(ROWS), T + 1), np.int32)
    segments = np.zeros_like(tokens)
    texts = iter(documents(vocabulary))
    for row, lengths in enumerate(ROWS):
        start = 0
        for number, length in enumerate(lengths, start=1):
            tokens[row, start : start + length] = next(texts)
            segments[row, start : start + length] = number
            start += length
    return {"tokens": tokens, "segments": segments}


def alone(vocabulary: int) -> dict[str, np.ndarray]:
    """A row for each document, filled up with tokens that count for nothing."""
    texts = documents(vocabulary)
    tokens = np.zeros((len(texts), T + 1), np.int32)
    weights = np.zeros((len(texts), T), np.float32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
        weights[row, : len(text) - 1] = 1
    return {"tokens": tokens, "weights": weights}


@functools.cache
def loaded_once(name):
    return loaded(name)[:2]


@functools.cache
def trained(name: str, attention: str, how, **build):
    """Loss, gradient and tokens that count of a batch."""
    config, params = loaded_once(name)
    model = transformer.build(config, attention=attention, **dict(build))
    grad = jax.jit(jax.value_and_grad(model.loss, has_aux=True))
    (loss, metrics), grads = grad(params, how(config.vocab_size))
    return float(loss), jax.tree.map(np.asarray, grads), float(metrics["tokens"])


@pytest.mark.parametrize("attention", ["dot_product", "splash"])
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_row_has_the_loss_of_its_documents_alone(name, attention):
    expected, expected_grads, count = trained(name, "dot_product", alone)
    loss, grads, counted = trained(name, attention, packed, remat="attention")
    assert counted == count == sum(n - 1 for row in ROWS for n in row)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for leaf, other in zip(
        jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True
    ):
        scale = np.abs(other).max()
        assert scale > 0
        np.testing.assert_allclose(leaf, other, atol=1e-5 * max(scale, 1))


def test_what_is_in_one_document_changes_no_other():
    config, params = loaded_once("gemma3")
    loss = jax.jit(transformer.build(config).loss)
    batch = packed(config.vocab_size)
    other = {**batch, "tokens": batch["tokens"].copy()}
    other["tokens"][0, 59] ^= 1  # the last token of the first document
    found = []
    for document in (1, 2, 3):
        weights = (batch["segments"][:, 1:] == document).astype(np.float32)
        weights[1] = 0
        found.append(
            [float(loss(params, {**b, "weights": weights})[0]) for b in (batch, other)]
        )
    assert found[0][0] != found[0][1]
    assert found[1][0] == found[1][1]
    assert found[2][0] == found[2][1]


def test_weights_leave_out_other_documents_and_padding():
    segments = jnp.array([[1, 1, 2, 2, 2, 3, 0, 0]])
    given = jnp.array([[1.0, 1, 0.5, 0, 1, 1, 1]])
    batch = {"tokens": jnp.arange(8)[None], "segments": segments}
    assert split_batch(batch)[2].tolist() == [[1, 0, 1, 1, 0, 0, 0]]
    weights = split_batch({**batch, "weights": given})[2]
    assert weights.tolist() == [[1, 0, 0.5, 0, 0, 0, 0]]
