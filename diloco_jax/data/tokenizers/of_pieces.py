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
from typing import Any, NamedTuple

import numpy as np

from diloco_jax.config.fields import is_utf8
from diloco_jax.data.tokenizers.beside import (
    ADDED,
    BESIDE,
    CONFIG,
    named_token,
    read_beside,
    refusing,
)
from diloco_jax.errors import ConfigError

NAME = "tokenizer.model"
SUFFIX = ".model"
NO_PREFIX = b"\x1a\x02\x18\x00"
"""`normalizer_spec.add_dummy_prefix = false` as a field of ModelProto. The last field
of a name counts, so behind a model's bytes it changes the model."""


class _Word(NamedTuple):
    """A word that is a token wherever a text spells it."""

    token: int
    shown: bool = False
    """Decoded text has it."""
    before: bool = False
    after: bool = False
    """White space before or after it belongs to it."""


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
            made: Any = SentencePieceProcessor(model_proto=data)
            self._pieces: int = made.vocab_size()
            if not self._pieces:
                raise ValueError("it has no piece")
            own = {
                made.id_to_piece(token): _Word(token)
                for token in range(self._pieces)
                if made.is_control(token) or made.is_unknown(token)
            }
            settings = read_beside(path, CONFIG)
        self._made = made
        self._later = functools.cache(
            lambda: SentencePieceProcessor(model_proto=data + NO_PREFIX)
        )
        added = {
            word: how
            for word, how in _added(path, settings).items()
            if self._is_added(path, word, how.token) and own.get(word) != how
        }
        self._words = own | added
        longest_first = sorted(self._words, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.name = str(path)
        of_words = repr(sorted(added.items())).encode() if added else b""
        self.digest = hashlib.sha256(data + of_words).hexdigest()[:16]
        highest = max((how.token for how in added.values()), default=-1)
        self.vocab_size = max(self._pieces, highest + 1)
        beside = (path.with_name(name) for name in BESIDE)
        self.files = (path, *(file for file in beside if file.is_file()))
        start = named_token(path, "bos_token", self._token_of)
        start = made.bos_id() if start is None else start
        begins = settings.get("add_bos_token") is not False and start >= 0
        self.start: tuple[int, ...] = (start,) if begins else ()
        end = named_token(path, "eos_token", self._token_of)
        end = made.eos_id() if end is None else end
        self.end: int | None = end if end >= 0 else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, int32 [n]."""
        with refusing(Path(self.name), "encode a text"):
            return [
                np.array(
                    [
                        token
                        for stretch in self._stretches(text)
                        for token in self._tokens(*stretch)
                    ],
                    np.int32,
                )
                for text in texts
            ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Those that are no piece have none."""
        shown = {how.token: word for word, how in self._words.items() if how.shown}
        parts, made = list[str](), self._made
        for word, group in itertools.groupby(map(int, tokens), shown.get):
            run = list(group)
            if word is not None:
                parts.append(word * len(run))
            else:
                parts.append(made.decode([t for t in run if 0 <= t < self._pieces]))
            made = self._later()
        return "".join(parts)

    def word(self, token: int) -> str:
        """Return the word of a token."""
        if 0 <= token < self._pieces:
            return str(self._made.id_to_piece(token))
        return next((w for w, how in self._words.items() if how.token == token), "")

    def _stretches(self, text: str) -> Iterator[tuple[int, str, _Word | None]]:
        """Yield the parts of a text that are special words, and those in between, each
        with its offset."""
        at = 0
        for match in self._special.finditer(text):
            how, (begin, end) = self._words[match[0]], match.span()
            between = text[at:begin].rstrip() if how.before else text[at:begin]
            if between:
                yield at, between, None
            yield begin, match[0], how
            at = end
            if how.after:
                at = len(text) - len(text[at:].lstrip())
        if at < len(text):
            yield at, text[at:], None

    def _tokens(self, offset: int, part: str, how: _Word | None) -> list[int]:
        """Return the tokens of a stretch. The space that the model puts before a text
        is for its first one alone."""
        if how is not None:
            return [how.token]
        made = self._later() if offset else self._made
        return list(made.encode(part))

    def _token_of(self, word: str) -> int | None:
        if word in self._words:
            return self._words[word].token
        token = self._made.piece_to_id(word)
        return int(token) if self._made.id_to_piece(token) == word else None

    def _is_added(self, path: Path, word: str, token: int) -> bool:
        """Tell if a word that is listed beside the model is more than its own piece."""
        if token >= self._pieces:
            return True
        if (piece := self._made.id_to_piece(token)) != word:
            raise _refused(path, f"have token {token} as {word!r}, the model {piece!r}")
        return token not in self._made.encode(word)


def _added(path: Path, settings: dict[str, Any]) -> dict[str, _Word]:
    """Return the words that the files beside a model list, with their tokens.

    Raises ConfigError for a file of another form, and for words that contradict."""
    found = dict[str, _Word]()
    try:
        for word, token in read_beside(path, ADDED).items():
            found[word] = _Word(_number(token), shown=True)
        for number, entry in (settings.get("added_tokens_decoder") or {}).items():
            word, token = entry["content"], _number(int(number))
            if word in found and found[word].token != token:
                raise ValueError(f"{word!r} is {token} and {found[word].token}")
            if entry.get("single_word"):
                raise ValueError(f"{word!r} is a token as a single word alone")
            found[word] = _Word(
                token,
                not entry.get("special"),
                bool(entry.get("lstrip")),
                bool(entry.get("rstrip")),
            )
        by_token = {how.token: word for word, how in found.items()}
        for word, how in found.items():
            if not word or not is_utf8(word) or by_token[how.token] != word:
                raise ValueError(f"{word!r} is {how.token}, as {by_token[how.token]!r}")
    except ConfigError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _refused(path, f"are of another form ({error})") from error
    return found


def _number(token: object) -> int:
    if type(token) is not int or not 0 <= token <= np.iinfo(np.int32).max:
        raise ValueError(f"{token!r} is no token")
    return token


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path}: the words that {ADDED} and {CONFIG} beside it add {why}; save the "
        f"model's tokenizer.json there, which has them, or give the files of one "
        f"tokenizer"
    )
