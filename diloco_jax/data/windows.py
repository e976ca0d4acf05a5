"""Windows of a long row of tokens, as rows to train on and to validate on.

`T` tokens are predicted of each window.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from diloco_jax.data.corpus import require_prediction, require_window
from diloco_jax.data.source import TOKENS, WEIGHTS, Fields, Row, cut
from diloco_jax.data.tokens import Tokens


class Windows:
    """Source of training windows.

    Window i holds tokens [i T, (i + 1) T]: neighbours share one token, and every
    token but the first is predicted once per epoch. Tokens at the end that do not fill
    a window are not trained on.
    """

    fields: ClassVar[Fields] = {"tokens": TOKENS}

    def __init__(self, tokens: Tokens, sequence_length: int):
        """tokens: integers [tokens]. ConfigError if they do not fill one window."""
        require_window(len(tokens), sequence_length)
        self._length = sequence_length
        self._tokens = tokens

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def parts(self, count: int) -> list[Windows]:
        """Cut the tokens into that many parts, and each into windows of its own."""
        bounds = cut(len(self._tokens), count)
        return [Windows(self._tokens[a:b], self._length) for a, b in bounds]

    def __getitem__(self, row: int) -> Row:
        start = row * self._length
        window = self._tokens[start : start + self._length + 1]
        return {"tokens": window.astype(np.int32)}


class ValidationWindows:
    """Source of windows in which every token but the first is predicted exactly once.

    The last one is filled up with zeros, and nothing is predicted there.
    """

    fields: ClassVar[Fields] = {"tokens": TOKENS, "weights": WEIGHTS}

    def __init__(self, tokens: Tokens, sequence_length: int):
        """tokens: integers [tokens]. ConfigError if there is nothing to predict."""
        require_prediction(len(tokens))
        self._length = sequence_length
        self._tokens = tokens

    def __len__(self) -> int:
        return -(-(len(self._tokens) - 1) // self._length)

    def __getitem__(self, row: int) -> Row:
        length, start = self._length, row * self._length
        text = self._tokens[start : start + length + 1]
        tokens = np.zeros(length + 1, np.int32)
        tokens[: len(text)] = text
        weights = (np.arange(length) < len(text) - 1).astype(np.float32)
        return {"tokens": tokens, "weights": weights}
