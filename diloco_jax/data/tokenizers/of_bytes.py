"""Text as bytes: the token of a byte is its value, and 0 separates documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from diloco_jax.data.tokenizers.tokenizer import Placed

SEPARATOR = 0
VOCAB_SIZE = 256


class Bytes:
    """The tokenizer of UTF-8 bytes; see `tokenizer.Tokenizer`."""

    name = digest = "bytes"
    vocab_size = VOCAB_SIZE
    start: tuple[int, ...] = ()
    end = SEPARATOR
    files: tuple[Path, ...] = ()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the bytes of each text, int32 [bytes]."""
        return [encode(text).astype(np.int32) for text in texts]

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        """Return the bytes of each text, and the characters that they are of."""
        characters = [
            [(n, n + 1) for n, c in enumerate(t) for _ in c.encode()] for t in texts
        ]
        return list(
            zip(map(np.ndarray.tolist, self.encode(texts)), characters, strict=True)
        )

    def token_of(self, word: str) -> int | None:
        """Return None: there are no words."""
        return None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of bytes; separators become line ends."""
        return decode(np.array([t for t in tokens if 0 <= t < VOCAB_SIZE], np.uint8))

    def word(self, token: int) -> str:
        """Return the byte as Python writes it; a higher token has none."""
        return repr(bytes([token])) if 0 <= token < VOCAB_SIZE else ""


def encode(text: str) -> np.ndarray:
    """Return the text's UTF-8 as uint8 [bytes]."""
    return np.frombuffer(text.encode(), np.uint8)


def decode(tokens: np.ndarray) -> str:
    """Return the text of integer [n] tokens; separators become line ends, broken
    characters a replacement mark."""
    data = np.asarray(tokens).astype(np.uint8)
    return bytes(np.where(data == SEPARATOR, ord("\n"), data)).decode(errors="replace")
