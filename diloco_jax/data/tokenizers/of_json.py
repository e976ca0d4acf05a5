"""Tokenizers in a file tokenizer.json, as most published models have them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax.data.tokenizers.beside import BESIDE, named_token, refusing
from diloco_jax.data.tokenizers.tokenizer import Placed
from diloco_jax.errors import ConfigError

NAME = "tokenizer.json"
PROBE = "a"


class JsonTokenizer:
    """A tokenizer in a file tokenizer.json; see `tokenizer.Tokenizer`.

    It never cuts or pads a document, even if the file asks for that.
    """

    def __init__(self, path: Path) -> None:
        """Raise ConfigError if the file is no tokenizer, or the library is not
        installed.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"{path} needs the package tokenizers; pip install 'diloco-jax[text]'"
            ) from error
        with refusing(path, "be read as a tokenizer"):
            data = path.read_bytes()
            self._made: Any = Tokenizer.from_buffer(data)
            self._made.no_truncation()
            self._made.no_padding()
            highest = max(self._made.get_vocab().values(), default=-1)
            if highest > np.iinfo(np.int32).max:
                raise ValueError(f"it has the token {highest}")
            whole = list(self._made.encode(PROBE).ids)
            bare = list(self._made.encode(PROBE, add_special_tokens=False).ids)
        self.name = str(path)
        self.digest = hashlib.sha256(data).hexdigest()[:16]
        self.vocab_size = highest + 1
        beside = (path.with_name(name) for name in BESIDE)
        self.files = (path, *(file for file in beside if file.is_file()))
        at = next((i for i in range(len(whole)) if whole[i:][: len(bare)] == bare), 0)
        self.start = tuple(whole[:at])
        after = whole[at + len(bare) :]
        end = after[0] if after else named_token(path, "eos_token", self.token_of, -1)
        self.end: int | None = end if end >= 0 else None
        # It would leave spaces out of a token's place, and nothing else is asked of it.
        self._made.post_processor = None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, int32 [n]."""
        with refusing(Path(self.name), "encode a text"):
            made = self._made.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in made]

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        """Return the tokens of each text, and the characters of each token."""
        with refusing(Path(self.name), "encode a text"):
            made = self._made.encode_batch(list(texts), add_special_tokens=False)
        return [(one.ids, one.offsets) for one in made]

    def token_of(self, word: str) -> int | None:
        """Return the token of a word, None if there is none."""
        found: int | None = self._made.token_to_id(word)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        with refusing(Path(self.name), "decode tokens"):
            text: str = self._made.decode([int(token) for token in tokens])
        return text

    def word(self, token: int) -> str:
        """Return the word of a token."""
        return self._made.id_to_token(token) or ""
