"""Text as bytes: the token of a byte is its value, and 0 separates documents."""

from __future__ import annotations

import numpy as np

SEPARATOR = 0
VOCAB_SIZE = 256


def encode(text: str) -> np.ndarray:
    """Return the text's UTF-8 as uint8 [bytes]."""
    return np.frombuffer(text.encode(), np.uint8)


def decode(tokens: np.ndarray) -> str:
    """Return the text of integer [n] tokens; separators become line ends, broken
    characters a replacement mark."""
    data = np.asarray(tokens).astype(np.uint8)
    return bytes(np.where(data == SEPARATOR, ord("\n"), data)).decode(errors="replace")
