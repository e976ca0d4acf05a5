"""Validation batches: every token of the validation text, predicted exactly once.

`B` sequences, `T` tokens predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from diloco_jax.data.corpus import require_prediction
from diloco_jax.data.stream import Batch, OwnRows, Rows
from diloco_jax.data.tokens import Tokens


class ValidationBatch(NamedTuple):
    """`tokens` int32 [B, T + 1]; `weights` f32 [B, T], 0 where padding is predicted. Of
    both, a host may have its own rows alone."""

    tokens: Batch
    weights: Batch


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
        self._own: tuple[Rows, ...] = ()

    def read_only(self, own: Sequence[Rows]) -> None:
        """Have only these rows of every batch read; empty: all."""
        self._own = tuple(dict.fromkeys(own))

    def __len__(self) -> int:
        per_batch = self.sequence_length * self.batch_size
        return -(-(len(self._tokens) - 1) // per_batch)

    def __getitem__(self, index: int) -> ValidationBatch:
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of {len(self)}")
        if not self._own:
            return ValidationBatch(*self._rows(index, (0, self.batch_size)))
        parts = {rows: self._rows(index, rows) for rows in self._own}
        size, length = self.batch_size, self.sequence_length
        tokens = {rows: part[0] for rows, part in parts.items()}
        weights = {rows: part[1] for rows, part in parts.items()}
        return ValidationBatch(
            OwnRows((size, length + 1), tokens), OwnRows((size, length), weights)
        )

    def _rows(self, index: int, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and weights of some rows of a batch."""
        shape = (rows[1] - rows[0], self.sequence_length)
        size = shape[0] * shape[1]
        start = (index * self.batch_size + rows[0]) * self.sequence_length
        text = self._tokens[start : start + size + 1]
        padded = np.zeros(size + 1, np.int32)
        padded[: len(text)] = text
        tokens = np.concatenate(
            (padded[:-1].reshape(shape), padded[1:].reshape(shape)[:, -1:]), axis=1
        )
        weights = (np.arange(size) < len(text) - 1).astype(np.float32)
        return tokens, weights.reshape(shape)

    def spread(self, count: int) -> list[int]:
        """Return the indices of at most `count` batches, evenly over the text."""
        count = min(count, len(self))
        return [i * len(self) // count for i in range(count)]
