"""Validation: batch by batch between steps, or the whole text at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from diloco_jax.data.reader import ValidationBatches
from diloco_jax.island.device.replica import WatchedModel
from diloco_jax.island.device.step import Trainer
from diloco_jax.island.timing import Timing, mean
from diloco_jax.models.model import Params
from diloco_jax.protocol.island.boundary import Watching


class Evaluation(NamedTuple):
    """Losses of a validation, `loss` in nats per token.

    `bits_per_byte` is None if the bytes of text per token are not known.
    """

    loss: float
    bits_per_byte: float | None
    by_source: Mapping[str, float] | None = None
    """Losses of its parts: of the sources of a mixture."""


class Evaluator:
    """Run passes over part of the validation text, one batch per step boundary.

    The parameters move on during a pass; the mean is over all of its batches.
    """

    def __init__(
        self,
        trainer: Trainer,
        validation: ValidationBatches,
        every_steps: int,
        batches: int,
    ):
        """every_steps: steps between two passes, 0 = none. batches: batches of one
        pass, spread evenly over the text, the same in every pass."""
        self._trainer = trainer
        self._validation = validation
        self._every_steps = every_steps
        self._batches = validation.spread(batches)
        self._done: list[tuple[float, float]] = []

    def due(self, step: int) -> bool:
        """Tell if `advance` is to be called after `step` steps."""
        if self._every_steps < 1 or not self._batches:
            return False
        return bool(self._done) or (step > 0 and step % self._every_steps == 0)

    def advance(self, params: Params) -> float | None:
        """Evaluate one batch and wait for it, so that its time is not taken for a
        step's. Return the mean loss of a pass in nats per token after its last
        batch."""
        batch = self._validation[self._batches[len(self._done)]]
        total, weight = self._trainer.eval_step(params, batch)
        self._done.append((float(total), float(weight)))
        if len(self._done) < len(self._batches):
            return None
        sums, self._done = self._done, []
        return mean(sums)


class Watcher:
    """Evaluates the copied anchors of a cycle, one batch per step boundary."""

    def __init__(
        self, watching: Watching, model: WatchedModel, evaluator: Evaluator
    ) -> None:
        self._watching, self._model = watching, model
        self._evaluator = evaluator

    def advance(self, timing: Timing) -> None:
        """Evaluate one batch if all anchors are copied; after the last one, note the
        cycle's loss in the measures."""
        if not self._watching.evaluates:
            return
        with timing.validation():
            loss = self._evaluator.advance(self._model.params)
        if loss is not None:
            timing.watched = self._watching.cycle, loss
            self._watching.evaluated()


def evaluate_all(
    trainer: Trainer,
    params: Params,
    parts: Mapping[str, ValidationBatches],
    report: Callable[[float], None] = lambda share: None,
) -> Evaluation:
    """Return the loss over all parts of the validation text, each token predicted once,
    and that of each part.

    report: called with the share that is done, after each batch.
    """
    sums: dict[str, list[tuple[float, float]]] = {}
    for number, (name, part) in enumerate(parts.items()):
        found = sums[name] = []
        for index in range(len(part)):
            total, weight = trainer.eval_step(params, part[index])
            found.append((float(total), float(weight)))
            report((number + len(found) / len(part)) / len(parts))
    (per_token,) = {part.bytes_per_token for part in parts.values()}
    loss = mean([pair for found in sums.values() for pair in found])
    per_byte = loss / math.log(2) / per_token if per_token else None
    return Evaluation(loss, per_byte, {name: mean(s) for name, s in sums.items()})
