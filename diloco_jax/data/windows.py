"""Windows of text, addressed by their position in one global shuffled index.

Position p is in epoch p // n, n windows to an epoch; each epoch is a permutation of
all windows drawn from (seed, epoch). Islands are leased ranges of positions, so numbers
alone decide which island trains on which text. `B` sequences, `T` tokens predicted.
"""

from __future__ import annotations

import grain
import numpy as np

from diloco_jax.data.corpus import require_window
from diloco_jax.data.tokens import Tokens


class Windows:
    """Random access to batches of training windows, without an index in memory.

    Window i holds tokens [i T, (i + 1) T]: neighbours share one token, and every
    token but the first is predicted once per epoch. Tokens at the end that do not fill
    a window are not trained on.
    """

    def __init__(self, tokens: Tokens, sequence_length: int, seed: int):
        """tokens: integers [tokens]. ConfigError if they do not fill one window."""
        require_window(len(tokens), sequence_length)
        self.sequence_length = sequence_length
        self._tokens = tokens
        self._count = (len(tokens) - 1) // sequence_length
        index = grain.MapDataset.range(self._count).seed(seed).shuffle().repeat()
        self._windows = index.map(self._window)

    def __len__(self) -> int:
        """Return the number of windows per epoch."""
        return self._count

    def window(self, position: int) -> np.ndarray:
        """Return int32 [T + 1], the window of a position."""
        window: np.ndarray = self._windows[position]
        return window

    def batch(self, positions: np.ndarray) -> np.ndarray:
        """Return int32 [B, T + 1], the windows of int64 [B] positions."""
        return np.stack([self.window(int(p)) for p in positions])

    def _window(self, index: int) -> np.ndarray:
        start = int(index) * self.sequence_length
        return self._tokens[start : start + self.sequence_length + 1].astype(np.int32)
