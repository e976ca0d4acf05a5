"""Validation is the mean over all tokens, whatever the batches."""

import math

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diloco_jax.config import IslandConfig
from diloco_jax.data.corpus import ValidationWindows
from diloco_jax.data.reader import ValidationBatches
from diloco_jax.data.source import SEGMENTS, TOKENS
from diloco_jax.island.device.mesh import make_mesh
from diloco_jax.island.device.step import Trainer
from diloco_jax.island.loop import Evaluator, evaluate_all
from diloco_jax.models.model import Model, split_batch, weighted_loss

TEXT = np.random.default_rng(0).integers(0, 256, 103).astype(np.uint8)


def make_trainer(accumulation=1, seen=None) -> Trainer:
    """Make a trainer of a model whose loss at a token is its value times a parameter.

    The loss is NaN without tokens. seen: gets the shapes that the model is called with.
    """

    def loss(params, batch):
        _, targets, weights = split_batch(batch)
        if seen is not None:
            seen.append(targets.shape)
        values = targets.astype(jnp.float32) * params["scale"]
        mean = jnp.sum(values * weights) / jnp.sum(weights)
        return mean, weighted_loss(values, weights)[1]

    model = Model(lambda key: {"scale": jnp.ones(())}, loss, {"scale": ()})
    island = IslandConfig(batch_size=2, accumulation=accumulation)
    return Trainer(model, optax.identity(), island, make_mesh(island))


def batches(length: int) -> ValidationBatches:
    source = ValidationWindows(TEXT, length)
    return ValidationBatches(source, 2, {"tokens": TOKENS}, length)


@pytest.fixture
def trainer() -> Trainer:
    return make_trainer()


def test_the_whole_text_counts_once(trainer):
    params = trainer.place_params({"scale": np.float32(0.5)})
    for length in (5, 51, 200):
        validation = batches(length)
        loss, bits, _ = evaluate_all(trainer, params, {"": validation})
        assert loss == pytest.approx(0.5 * TEXT[1:].mean(), rel=1e-6)
        assert bits == pytest.approx(loss / math.log(2))


def test_the_share_that_is_done_is_told_after_each_batch(trainer):
    params = trainer.place_params({"scale": np.float32(0.5)})
    told = []
    evaluate_all(trainer, params, {"": batches(5)}, told.append)
    assert len(told) > 1
    assert told == [(number + 1) / len(told) for number in range(len(told))]

    parts = {"first": batches(5), "second": batches(200)}
    alone, told[:] = len(told), []
    evaluate_all(trainer, params, parts, told.append)
    assert told == sorted(told)
    assert (told[alone - 1], told[-1]) == (0.5, 1.0)


def test_a_hosts_own_rows_count_like_the_whole_batch(trainer):
    params = trainer.place_params({"scale": np.float32(0.5)})
    validation = batches(51)
    whole = evaluate_all(trainer, params, {"": validation})
    validation.read_only([(0, 2)])
    assert evaluate_all(trainer, params, {"": validation}) == whole


def test_a_batch_that_trains_in_rounds_is_evaluated_in_rounds():
    seen = []
    trainer = make_trainer(accumulation=2, seen=seen)
    params = trainer.place_params({"scale": np.float32(0.5)})
    for length in (51, 200):  # the latter has a round of padding only
        validation = batches(length)
        loss, *_ = evaluate_all(trainer, params, {"": validation})
        assert loss == pytest.approx(0.5 * TEXT[1:].mean(), rel=1e-6)
        assert set(seen) == {(1, length)}
        seen.clear()


class Packed:
    """Rows of two documents each, some of which end in padding."""

    fields = {"tokens": TOKENS, "segments": SEGMENTS}  # noqa: RUF012
    segments = np.array([[1, 1, 1, 2, 2], [1, 1, 2, 0, 0], [1, 2, 2, 2, 0]])

    def __len__(self):
        return len(self.segments)

    def __getitem__(self, row):
        tokens = np.arange(5) + 10 * row
        return {"tokens": tokens, "segments": self.segments[row]}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_packed_rows_are_validated_within_their_documents(accumulation):
    trainer = make_trainer(accumulation)
    params = trainer.place_params({"scale": np.float32(1.0)})
    packed = Packed()
    validation = ValidationBatches(packed, 2, packed.fields, 4, bytes_per_token=4.0)
    loss, bits, _ = evaluate_all(trainer, params, {"": validation})
    assert loss == pytest.approx(np.mean([1, 2, 4, 11, 22, 23]))
    assert bits == pytest.approx(loss / math.log(2) / 4)


def test_a_pass_goes_one_batch_per_call(trainer):
    validation = batches(10)
    params = trainer.place_params({"scale": np.float32(1.0)})
    whole = Evaluator(trainer, validation, every_steps=4, batches=99)
    steps = [step for step in range(4) if whole.due(step)]
    assert steps == []
    for _ in range(2):  # a second pass does not remember the first
        found = []
        for step in range(4, 4 + len(validation)):
            assert whole.due(step)
            found.append(whole.advance(params))
        assert found[:-1] == [None] * (len(validation) - 1)
        assert found[-1] == pytest.approx(TEXT[1:].mean(), rel=1e-6)
        assert not whole.due(5)


def test_part_of_the_text_is_the_same_part_in_every_pass(trainer):
    validation = batches(10)
    params = trainer.place_params({"scale": np.float32(1.0)})
    part = Evaluator(trainer, validation, every_steps=1, batches=2)
    first, second = ([part.advance(params) for _ in range(2)] for _ in range(2))
    assert first == second
    chosen = [validation[i]["tokens"][:, 1:] for i in validation.spread(2)]
    assert first[-1] == pytest.approx(np.mean(chosen), rel=1e-6)


def test_zero_means_never(trainer):
    validation = batches(10)
    assert not Evaluator(trainer, validation, 0, 8).due(8)
    assert not Evaluator(trainer, validation, 8, 0).due(8)
