"""Tokenizers: text to tokens and back. `open_tokenizer` finds the one of a path.

- Bytes: the token of a byte is its value, and 0 separates documents.
- `tokenizer.json`, as most published models have it.
- SentencePiece, in a file `*.model`. A text that spells one of its control pieces, or a
  word that the files beside it add, gets that token.

Files beside a tokenizer's own name its start and end, and words that were added to
those of its own file.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax import run_files
from diloco_jax.config import ModelConfig
from diloco_jax.errors import ConfigError
from diloco_jax.files import how_to_mend, parse_json

JSON_NAME = "tokenizer.json"
PIECES_NAME = "tokenizer.model"
PIECES_SUFFIX = ".model"
CONFIG = "tokenizer_config.json"
ADDED = "added_tokens.json"
NAMING = (CONFIG, "special_tokens_map.json")
BESIDE = (*NAMING, ADDED, "chat_template.jinja")
"""Files that say which tokens are special, and how a chat is written."""

Placed = tuple[Sequence[int], Sequence[tuple[int, int]]]
"""Tokens, and of each its first character in the text and the one after its last. A
token of a part of a character may have an empty place before it."""


class Tokenizer(abc.ABC):
    """Turns text into tokens and back. Two tokenizers of one digest give the same
    tokens.
    """

    name: str
    """The path of the file, or "bytes"; for messages."""
    digest: str
    """16 hex digits over the file's contents; "bytes" if there is no file."""
    vocab_size: int
    """The highest token plus one."""
    start: tuple[int, ...] = ()
    """Tokens that the tokenizer itself puts before a text."""
    end: int | None
    """The token that ends a document; None if the tokenizer's files name none."""
    files: tuple[Path, ...] = ()
    """The files from which `open_tokenizer` makes the same tokenizer again."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Let another process open the file again."""
        return open_tokenizer, (str(self.files[0]) if self.files else "",)

    @abc.abstractmethod
    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, int32 [n], without start and end tokens.

        A text that spells a special token becomes that token.
        """

    @abc.abstractmethod
    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        """Return the tokens of each text, as `encode` does, with their places."""

    @abc.abstractmethod
    def token_of(self, word: str) -> int | None:
        """Return the token of a word, None if the tokenizer has no such word."""

    @abc.abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones, and without those that the
        tokenizer does not have. Broken characters become replacement marks.
        """

    @abc.abstractmethod
    def word(self, token: int) -> str:
        """Return the word of a token as the files have it, empty if they have none."""

    def _name(self, path: Path, contents: bytes) -> None:
        self.name, self.digest = str(path), hashlib.sha256(contents).hexdigest()[:16]
        beside = (path.with_name(name) for name in BESIDE)
        self.files = (path, *(file for file in beside if file.is_file()))


def open_tokenizer(path: str | Path, field: str = "data.tokenizer") -> Tokenizer:
    """Open a tokenizer.json, a .model of SentencePiece, or a folder that has one; ""
    is the tokenizer of bytes.

    Raises ConfigError, naming `field`, if the path has none of these.
    """
    if not str(path):
        return Bytes()
    given = Path(path)
    found = find_tokenizer(given) if given.is_dir() else given
    if found is None or not found.is_file():
        what = (
            f"has neither {JSON_NAME} nor {PIECES_NAME}"
            if found is None
            else "is no file"
        )
        raise ConfigError(
            f"{field}: {given} {what}; give a tokenizer.json, a {PIECES_SUFFIX} of "
            f"SentencePiece, or a folder that has one"
        )
    if found.suffix == ".json":
        return JsonTokenizer(found)
    if found.suffix == PIECES_SUFFIX:
        return PiecesTokenizer(found)
    raise ConfigError(
        f"{field}: {found} ends neither in .json nor in {PIECES_SUFFIX}; give a "
        f"tokenizer.json or a {PIECES_SUFFIX} of SentencePiece"
    )


def find_tokenizer(folder: Path) -> Path | None:
    """Return the tokenizer's file in a folder, None if it has none. Where there are
    both kinds, tokenizer.json counts: it has the words that were added, too."""
    found = (folder / name for name in (JSON_NAME, PIECES_NAME))
    return next((path for path in found if path.is_file()), None)


def kept_name(path: Path) -> str:
    """Return the name under which a run keeps and exports a file of a tokenizer."""
    if path.name in BESIDE:
        return path.name
    return PIECES_NAME if path.suffix == PIECES_SUFFIX else JSON_NAME


def tokenizer_of_weights(weights: str) -> Path | None:
    """Return the tokenizer's file in the folder that a run starts from, as
    `model.weights` names it; None if there is none."""
    kind, _, folder = weights.partition(":")
    beside = Path(folder, "" if kind == "hf" else run_files.SOURCE)
    return find_tokenizer(beside) if weights and beside.is_dir() else None


def require_tokenizer(tokenizer: Tokenizer, model: ModelConfig, data: str) -> None:
    """Raise ConfigError if the data's tokenizer is another one than that of the weights
    that a run starts from. data: names the data."""
    theirs = tokenizer_of_weights(model.weights)
    if theirs is not None:
        digest = open_tokenizer(theirs).digest
        require_digest(tokenizer.digest, digest, data, str(theirs))


def require_digest(ours: str, theirs: str, data: str, name: str) -> None:
    """Raise ConfigError, with both digests, if data was made with another tokenizer.

    ours: digest of the tokenizer that the data was made with; data: names it. theirs
    and name: digest and name of the one that it has to be.
    """
    if ours != theirs:
        raise ConfigError(
            f"data.tokenizer: {data} is of the tokenizer {ours}, but {name} is "
            f"{theirs}; make the data again with `diloco data prepare OUT SOURCES "
            f"--tokenizer {name}`"
        )


SEPARATOR = 0
VOCAB_SIZE = 256


class Bytes(Tokenizer):
    """The tokenizer of UTF-8 bytes. There are no words; a separator becomes the end of
    a line."""

    name = digest = "bytes"
    vocab_size = VOCAB_SIZE
    end = SEPARATOR

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [
            np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts
        ]

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        return [
            (
                list(text.encode()),
                [(n, n + 1) for n, c in enumerate(text) for _ in c.encode()],
            )
            for text in texts
        ]

    def token_of(self, word: str) -> int | None:
        return None

    def decode(self, tokens: Sequence[int]) -> str:
        data = bytes(t for t in tokens if 0 <= t < VOCAB_SIZE)
        return data.replace(bytes([SEPARATOR]), b"\n").decode(errors="replace")

    def word(self, token: int) -> str:
        """Return the byte as Python writes it; a higher token has none."""
        return repr(bytes([token])) if 0 <= token < VOCAB_SIZE else ""


PROBE = "a"
"""What shows the special tokens around a document; else a word of the vocabulary."""


class JsonTokenizer(Tokenizer):
    """A tokenizer in a file tokenizer.json.

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
            whole, bare = self._probed()
        self._name(path, data)
        self.vocab_size = highest + 1
        at = next((i for i in range(len(whole)) if whole[i:][: len(bare)] == bare), 0)
        self.start = tuple(whole[:at])
        after = whole[at + len(bare) :]
        end = after[0] if after else named_token(path, "eos_token", self.token_of, -1)
        self.end = end if end >= 0 else None
        # It would leave spaces out of a token's place, and nothing else is asked of it.
        self._made.post_processor = None

    def _probed(self) -> tuple[list[int], list[int]]:
        """Return the tokens of a text with and without the special ones around it.
        Raises ValueError if there is no text that has tokens."""
        added = self._made.get_added_tokens_decoder().values()
        special = {token.content for token in added}
        for text in (PROBE, *self._made.get_vocab()):
            bare = list(self._made.encode(text, add_special_tokens=False).ids)
            if bare and text not in special:
                return list(self._made.encode(text).ids), bare
        raise ValueError("no word of its vocabulary has a token")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        with refusing(Path(self.name), "encode a text"):
            made = self._made.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in made]

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        with refusing(Path(self.name), "encode a text"):
            made = self._made.encode_batch(list(texts), add_special_tokens=False)
        return [(one.ids, one.offsets) for one in made]

    def token_of(self, word: str) -> int | None:
        found: int | None = self._made.token_to_id(word)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        with refusing(Path(self.name), "decode tokens"):
            text: str = self._made.decode([int(token) for token in tokens])
        return text

    def word(self, token: int) -> str:
        return self._made.id_to_token(token) or ""


NO_PREFIX = b"\x1a\x02\x18\x00"
"""`normalizer_spec.add_dummy_prefix = false` as a field of ModelProto. The last field
of a name counts, so behind a model's bytes it changes the model."""


class PiecesTokenizer(Tokenizer):
    """A tokenizer of SentencePiece."""

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
        self._name(
            path, data + (repr(sorted(added.items())).encode() if added else b"")
        )
        self.vocab_size = max(self._pieces - 1, *self._words.values()) + 1
        start = named_token(path, "bos_token", self.token_of, self._made.bos_id())
        begins = settings.get("add_bos_token") is not False and start >= 0
        self.start = (start,) if begins else ()
        end = named_token(path, "eos_token", self.token_of, self._made.eos_id())
        self.end = end if end >= 0 else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        found = []
        with refusing(Path(self.name), "encode a text"):
            for text in texts:
                parts = (
                    made.encode(part) if token is None else [token]
                    for made, _, part, token in self._stretches(text)
                )
                found.append(np.array([*itertools.chain(*parts)], np.int32))
        return found

    def encode_placed(self, texts: Sequence[str]) -> list[Placed]:
        with refusing(Path(self.name), "encode a text"):
            return [self._placed(text) for text in texts]

    def _placed(self, text: str) -> Placed:
        tokens, places = list[int](), list[tuple[int, int]]()
        for made, offset, part, token in self._stretches(text):
            if token is None:
                one = made.encode(part, return_type="offset_mapping")
                tokens += one["ids"]
                places += [(offset + b, offset + e) for b, e in one["offsets"]]
            else:
                tokens.append(token)
                places.append((offset, offset + len(part)))
        return tokens, places

    def decode(self, tokens: Sequence[int]) -> str:
        parts, made = list[str](), self._made
        for word, group in itertools.groupby(map(int, tokens), self._shown.get):
            run = list(group)
            pieces = [token for token in run if 0 <= token < self._pieces]
            parts.append(made.decode(pieces) if word is None else word * len(run))
            made = self._later()
        return "".join(parts)

    def word(self, token: int) -> str:
        if 0 <= token < self._pieces:
            return str(self._made.id_to_piece(token))
        return next((word for word, t in self._words.items() if t == token), "")

    def token_of(self, word: str) -> int | None:
        token = self._words.get(word, self._made.piece_to_id(word))
        return int(token) if self.word(token) == word else None

    def _stretches(self, text: str) -> Iterator[tuple[Any, int, str, int | None]]:
        """Yield the special words of a text, with their tokens, and the parts between
        them, each with its encoder and its offset. The space that the model puts before
        a text is for its first part alone."""
        at = 0
        for number, part in enumerate(self._special.split(text)):
            if part:
                made = self._later() if at else self._made
                yield made, at, part, self._words[part] if number % 2 else None
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


@contextlib.contextmanager
def refusing(path: Path, what: str) -> Iterator[None]:
    """Raise ConfigError, naming the file, for all that a tokenizer's library raises.

    what: says what the file is not fit for, as "be read as a tokenizer".
    """
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # A panic of Rust is no Exception.
        raise ConfigError(
            f"{path} cannot {what} ({error}); {how_to_mend(path)}"
        ) from error


def read_beside(path: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file beside a tokenizer's, empty if there is none.

    Raises ConfigError, naming the file, if it is no JSON object."""
    beside = path.with_name(name)
    try:
        found = parse_json(beside.read_bytes()) if beside.is_file() else {}
        if not isinstance(found, dict):
            raise ValueError(f"it is of type {type(found).__name__}")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{beside} cannot be read as a JSON object ({error}); copy it again, or "
            f"leave it out"
        ) from error
    return found


def named_token(
    path: Path, field: str, token_of: Callable[[str], int | None], default: int
) -> int:
    """Return the token that the files beside a tokenizer's name as its `bos_token` or
    `eos_token`; the default if they name none.

    Raises ConfigError, naming the file, if it is none of the tokenizer's words."""
    for name in NAMING:
        named = read_beside(path, name).get(field)
        if named is None:
            continue
        word: Any = named.get("content") if isinstance(named, dict) else named
        found: int | None = None
        with contextlib.suppress(TypeError, RuntimeError, UnicodeError):
            found = token_of(word)
        if found is None:
            raise ConfigError(
                f"{path.with_name(name)}: {field} = {named!r} is no token of {path}; "
                f"give the files of one tokenizer"
            )
        return found
    return default
