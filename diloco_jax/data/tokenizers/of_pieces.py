"""Tokenizers of SentencePiece, in a file *.model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax.errors import ConfigError
from diloco_jax.files import how_to_mend

NAME = "tokenizer.model"
SUFFIX = ".model"


class PiecesTokenizer:
    """A tokenizer of SentencePiece; see `tokenizer.Tokenizer`."""

    def __init__(self, path: Path) -> None:
        """Raise ConfigError if the file is no tokenizer, or the library is not
        installed.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ConfigError(
                f"{path} needs the package sentencepiece; "
                f"pip install 'diloco-jax[text]'"
            ) from error
        try:
            data = path.read_bytes()
            self._made: Any = SentencePieceProcessor(model_proto=data)
        except Exception as error:  # The library raises no narrower one.
            raise ConfigError(
                f"{path} cannot be read as a model of SentencePiece ({error}); "
                f"{how_to_mend(path)}"
            ) from error
        self.name = str(path)
        self.digest = hashlib.sha256(data).hexdigest()[:16]
        self.vocab_size = self._made.vocab_size()
        self.files = (path,)
        start, end = self._made.bos_id(), self._made.eos_id()
        self.start: tuple[int, ...] = (start,) if start >= 0 else ()
        self.end: int | None = end if end >= 0 else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, int32 [n]."""
        made = self._made.encode(list(texts), num_threads=1)
        return [np.array(ids, np.int32) for ids in made]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self._made.decode([int(token) for token in tokens])
        return text
