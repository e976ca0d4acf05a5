"""The interface of a tokenizer, which every kind in this folder has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np


class Tokenizer(Protocol):
    """Text to tokens and back. Frozen: two of one digest give the same tokens."""

    @property
    def name(self) -> str:
        """The file, or "bytes", for messages."""

    @property
    def digest(self) -> str:
        """16 hex digits of the file's contents; "bytes" where there is none."""

    @property
    def vocab_size(self) -> int:
        """The highest token and one."""

    @property
    def start(self) -> tuple[int, ...]:
        """Tokens that the tokenizer itself puts before a text."""

    @property
    def end(self) -> int | None:
        """The token that ends a document; None if the files name none."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that make another one like it."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, int32 [n], without start and end. A word of
        the text that is written like a special token becomes that token."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out; broken characters become
        replacement marks."""
