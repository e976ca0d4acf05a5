"""Validation batches: every token of the validation text, predicted exactly once.

`B` sequences, `T` tokens predicted.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from diloco_jax.data.corpus import require_prediction
from diloco_jax.data.tokens import Tokens


class ValidationBatch(NamedTuple):
    """`tokens` int32 [B, T + 1]; `weights` f32 [B, T], 0 where padding is predicted."""

    tokens: np.ndarray
    weights: np.ndarray


class ValidationBatches:
    """A sequence of equally shaped batches in the order of the text."""

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        batch_size: int,
        *,
        of_bytes: bool = True,
    ):
        """tokens: integers [tokens]. ConfigError if there is nothing to predict."""
        require_prediction(len(tokens))
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.of_bytes = of_bytes
        self._tokens = tokens

    def __len__(self) -> int:
        per_batch = self.sequence_length * self.batch_size
        return -(-(len(self._tokens) - 1) // per_batch)

    def __getitem__(self, index: int) -> ValidationBatch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        shape = (self.batch_size, self.sequence_length)
        size = self.batch_size * self.sequence_length
        text = self._tokens[index * size : (index + 1) * size + 1]
        padded = np.zeros(size + 1, np.int32)
        padded[: len(text)] = text
        tokens = np.concatenate(
            (padded[:-1].reshape(shape), padded[1:].reshape(shape)[:, -1:]), axis=1
        )
        weights = (np.arange(size) < len(text) - 1).astype(np.float32)
        return ValidationBatch(tokens, weights.reshape(shape))

    def spread(self, count: int) -> list[int]:
        """Return the indices of at most `count` batches, evenly over the text."""
        count = min(count, len(self))
        return [i * len(self) // count for i in range(count)]
