"""The interface of a tokenizer, which every kind in this folder has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

Placed = tuple[Sequence[int], Sequence[tuple[int, int]]]
"""Tokens, and of each its first character in the text and the one after its last. A
token of a part of a character may have an empty place before it."""


class Tokenizer(Protocol):
    """Turns text into tokens and back. Two tokenizers of one digest give the same
    tokens.
    """

    @property
    def name(self) -> str:
        """The path of the file, or "bytes"; for messages."""

    @property
    def digest(self) -> str:
        """16 hex digits over the file's contents; "bytes" if there is no file."""

    @property
    def vocab_size(self) -> int:
        """The highest token plus one."""

    @property
    def start(self) -> tuple[int, ...]:
        """Tokens that the tokenizer itself puts before a text."""

    @property
    def end(self) -> int | None:
        """The token that ends a document; None if the tokenizer's files name none."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files from which `opening.open_tokenizer` makes the same tokenizer
        again.
        """

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, int32 [n], without start and end tokens.

        A text that spells a special token becomes that token.
        """

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        """Return the tokens of each text, as `encode` does, with their places."""

    def token_of(self, word: str) -> int | None:
        """Return the token of a word, None if the tokenizer has no such word."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones, and without those that the
        tokenizer does not have. Broken characters become replacement marks.
        """

    def word(self, token: int) -> str:
        """Return the word of a token as the files have it, empty if they have none."""
