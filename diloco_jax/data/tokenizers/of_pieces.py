"""Tokenizers of SentencePiece, in a file *.model.

A text that spells one of its control pieces, or a word that the files beside it add,
gets that token.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax.data.tokenizers.beside import (
    ADDED,
    BESIDE,
    CONFIG,
    named_token,
    read_beside,
    refusing,
)
from diloco_jax.data.tokenizers.tokenizer import Placed
from diloco_jax.errors import ConfigError

NAME = "tokenizer.model"
SUFFIX = ".model"
NO_PREFIX = b"\x1a\x02\x18\x00"
"""`normalizer_spec.add_dummy_prefix = false` as a field of ModelProto. The last field
of a name counts, so behind a model's bytes it changes the model."""


class PiecesTokenizer:
    """A tokenizer of SentencePiece; see `tokenizer.Tokenizer`."""

    def __init__(self, path: Path) -> None:
        """Raise ConfigError if the file is no tokenizer, the files beside it are of
        another one, or the library is not installed.
        """
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError as error:
            raise ConfigError(
                f"{path} needs the package sentencepiece; "
                f"pip install 'diloco-jax[text]'"
            ) from error
        with refusing(path, "be read as a model of SentencePiece"):
            data = path.read_bytes()
            self._made: Any = SentencePieceProcessor(model_proto=data)
            self._pieces: int = self._made.vocab_size()
            if not self._pieces:
                raise ValueError("it has no piece")
            self._words: dict[str, int] = {
                self.word(token): token
                for token in range(self._pieces)
                if self._made.is_control(token) or self._made.is_unknown(token)
            }
        self._later = functools.cache(
            lambda: SentencePieceProcessor(model_proto=data + NO_PREFIX)
        )
        listed, settings = read_beside(path, ADDED), read_beside(path, CONFIG)
        self._shown: dict[int, str] = {}
        try:
            added = self._added(listed, settings.get("added_tokens_decoder") or {})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{path}: words that {ADDED} or {CONFIG} beside it add cannot be used "
                f"({error}); save the model's tokenizer.json there, which has them, or "
                f"give the files of one tokenizer"
            ) from error
        self._words |= added
        longest_first = sorted(self._words, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self.name = str(path)
        of_words = repr(sorted(added.items())).encode() if added else b""
        self.digest = hashlib.sha256(data + of_words).hexdigest()[:16]
        self.vocab_size = max(self._pieces - 1, *self._words.values()) + 1
        beside = (path.with_name(name) for name in BESIDE)
        self.files = (path, *(file for file in beside if file.is_file()))
        start = named_token(path, "bos_token", self.token_of, self._made.bos_id())
        begins = settings.get("add_bos_token") is not False and start >= 0
        self.start: tuple[int, ...] = (start,) if begins else ()
        end = named_token(path, "eos_token", self.token_of, self._made.eos_id())
        self.end: int | None = end if end >= 0 else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, int32 [n]."""
        found = []
        with refusing(Path(self.name), "encode a text"):
            for text in texts:
                tokens = list[int]()
                for offset, part, token in self._stretches(text):
                    made = self._later() if offset else self._made
                    tokens += made.encode(part) if token is None else [token]
                found.append(np.array(tokens, np.int32))
        return found

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        """Return the tokens of each text, and the characters of each token."""
        found = list[Placed]()
        for text in texts:
            tokens, places = list[int](), list[tuple[int, int]]()
            for offset, part, token in self._stretches(text):
                made = self._later() if offset else self._made
                if token is None:
                    one = made.encode(part, return_type="offset_mapping")
                    tokens += one["ids"]
                    places += [(offset + b, offset + e) for b, e in one["offsets"]]
                else:
                    tokens.append(token)
                    places.append((offset, offset + len(part)))
            found.append((tokens, places))
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens."""
        parts, made = list[str](), self._made
        for word, group in itertools.groupby(map(int, tokens), self._shown.get):
            run = list(group)
            pieces = [token for token in run if 0 <= token < self._pieces]
            parts.append(made.decode(pieces) if word is None else word * len(run))
            made = self._later()
        return "".join(parts)

    def word(self, token: int) -> str:
        """Return the word of a token."""
        if 0 <= token < self._pieces:
            return str(self._made.id_to_piece(token))
        return next((word for word, t in self._words.items() if t == token), "")

    def token_of(self, word: str) -> int | None:
        """Return the token of a word, None if there is none."""
        token = self._words.get(word, self._made.piece_to_id(word))
        return int(token) if self.word(token) == word else None

    def _stretches(self, text: str) -> Iterator[tuple[int, str, int | None]]:
        """Yield the special words of a text, with their tokens, and the parts between
        them, each with its offset. The space that the model puts before a text is for
        its first part alone."""
        at = 0
        for number, part in enumerate(self._special.split(text)):
            if part:
                yield at, part, self._words[part] if number % 2 else None
            at += len(part)

    def _added(self, listed: dict[str, Any], decoder: dict[str, Any]) -> dict[str, int]:
        """Return the words that are more than pieces of the model, with their tokens;
        note those that a decoded text has.

        listed, decoder: as `ADDED` and `added_tokens_decoder` of `CONFIG` have them.
        Raises ValueError, or another error of their form, if they contradict each other
        or the model.
        """
        words: list[tuple[str, Any, dict[str, Any]]]
        words = [(word, token, {}) for word, token in listed.items()]
        words += [(how["content"], int(t), how) for t, how in decoder.items()]
        found = dict[str, int]()
        for word, token, how in words:
            if type(token) is not int or not 0 <= token <= np.iinfo(np.int32).max:
                raise ValueError(f"{word!r} is {token!r}, which is no token")
            if not word.encode() or found.setdefault(word, token) != token:
                raise ValueError(f"{word!r} is {token} and {found.get(word)}")
            if token < self._pieces and self.word(token) != word:
                raise ValueError(f"{word!r} is {token}, here {self.word(token)!r}")
            for flag in ("lstrip", "rstrip", "single_word"):
                if how.get(flag):
                    raise ValueError(f"{word!r} has {flag}")
            if token >= self._pieces:
                self._shown[token] = "" if how.get("special") else word
        if len(set(found.values())) < len(found):
            raise ValueError("two of them are one token")
        return {
            word: token
            for word, token in found.items()
            if word not in self._words and token not in self._made.encode(word)
        }
