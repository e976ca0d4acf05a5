"""Tokenizers in a file tokenizer.json, as most published models have them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax.errors import ConfigError
from diloco_jax.files import how_to_mend, parse_json

NAME = "tokenizer.json"
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files beside it that say which tokens are special, and how a chat is written."""
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
        try:
            data = path.read_bytes()
            self._made: Any = Tokenizer.from_buffer(data)
        except Exception as error:  # The library raises no narrower one.
            raise ConfigError(
                f"{path} cannot be read as a tokenizer ({error}); {how_to_mend(path)}"
            ) from error
        self._made.no_truncation()
        self._made.no_padding()
        self.name = str(path)
        self.digest = hashlib.sha256(data).hexdigest()[:16]
        self.vocab_size = max(self._made.get_vocab().values(), default=-1) + 1
        beside = (path.with_name(name) for name in BESIDE)
        self.files = (path, *(file for file in beside if file.is_file()))
        whole = list(self._made.encode(PROBE).ids)
        bare = list(self._made.encode(PROBE, add_special_tokens=False).ids)
        at = next((i for i in range(len(whole)) if whole[i:][: len(bare)] == bare), 0)
        self.start = tuple(whole[:at])
        after = whole[at + len(bare) :]
        self.end = after[0] if after else self._named_end(path)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, int32 [n]."""
        made = self._made.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in made]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        text: str = self._made.decode([int(token) for token in tokens])
        return text

    def _named_end(self, path: Path) -> int | None:
        """Return the token that the files beside it name as a text's end.

        Raises ConfigError, naming the file, if it is no JSON object, or names none of
        the tokenizer's words."""
        for beside in (path.with_name(name) for name in BESIDE[:2]):
            if not beside.is_file():
                continue
            try:
                settings = parse_json(beside.read_bytes())
                end = settings.get("eos_token")
            except (OSError, ValueError, AttributeError) as error:
                raise ConfigError(
                    f"{beside} cannot be read as a JSON object ({error}); copy it "
                    f"again, or leave it out"
                ) from error
            if end is None:
                continue
            word = end.get("content") if isinstance(end, dict) else end
            found = self._made.token_to_id(word) if isinstance(word, str) else None
            if found is None:
                raise ConfigError(
                    f"{beside}: eos_token = {end!r} is no token of {path}; give the "
                    f"files of one tokenizer"
                )
            return int(found)
        return None
