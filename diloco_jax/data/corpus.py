"""Text or token files as two long rows of tokens: to train on, and to validate on.

The same files give the same corpus, split and digest on every machine. A start reads
the small ones; large ones are mapped, and their manifests tell their digests. Windows
of a row are the rows of a run; `T` tokens are predicted of each.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from diloco_jax.config import ConfigError, DataConfig
from diloco_jax.data.documents import (
    SourceKind,
    encoded,
    find_documents,
    inventory,
    is_large,
)
from diloco_jax.data.manifest import read_file
from diloco_jax.data.source import TOKENS, WEIGHTS, Fields, Row, cut
from diloco_jax.data.tokenizers import SEPARATOR, VOCAB_SIZE, open_tokenizer

logger = logging.getLogger(__name__)

SAMPLES = 16
"""Chunks of a corpus that a start checks, and at least one of each file."""


class TokenRow:
    """Arrays one after the other, without a copy: like the result of
    `numpy.concatenate`, for `len` and slices alone."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def __getitem__(self, wanted: slice) -> np.ndarray:
        """Return a copy of the tokens in a slice of step 1."""
        start, stop, _ = wanted.indices(len(self))
        first = int(np.searchsorted(self._ends, start, side="right"))
        found = []
        for part, end in zip(self._parts[first:], self._ends[first:], strict=True):
            began = int(end) - len(part)
            if began >= stop:
                break
            found.append(part[max(0, start - began) : stop - began])
        return np.concatenate(found) if found else np.zeros(0, np.int32)


Tokens = np.ndarray | TokenRow
"""Integers [tokens]; both are read by slices."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents as two rows of tokens. In text, a separator follows each document.

    Attributes:
      train, validation: integers [tokens]; uint8 for text.
      digest: 16 hex digits over the documents' names and contents.
      names: names of all documents, in order.
      largest: the highest token.
      of_bytes: True if tokens are bytes.
    """

    train: Tokens
    validation: Tokens
    digest: str
    names: tuple[str, ...]
    largest: int = VOCAB_SIZE - 1
    of_bytes: bool = True


def load_corpus(
    paths: tuple[str, ...], validation_fraction: float, *, copied: bool = False
) -> Corpus:
    """Read the corpus.

    Args:
      paths: text files, and folders in which every regular file counts, hidden ones
        apart, and those without documents (`documents.py`); or token files
        (`documents.py`); none = the Python standard library's own sources.
      validation_fraction: share of the documents held out. A document's side depends
        on its name alone, so new documents move no others. Where that leaves a side
        without any, as with one file, the end of every document is held out.
      copied: the files are copies of those that the manifests were made of, and the
        digest is compared with another's. Files that have manifests are then not read:
        of one with another time of change, `SAMPLES` chunks are checked.

    Raises:
      ConfigError: a file that is not its manifest's, a path that is missing,
        empty or not text, or text beside tokens.
    """
    found = find_documents(paths)
    used = [file for file in found if file.kind is not SourceKind.LEFT_OUT]
    if len(used) < len(found):
        logger.warning("data.paths: %s", inventory(found))
    large = sum(is_large(path) for _, path, _ in used)
    samples = max(1, SAMPLES // max(large, 1)) if copied else None
    tokenised = [path for _, path, kind in used if kind is SourceKind.TOKENS]
    for _, path, kind in used:
        if kind not in (SourceKind.TEXT, SourceKind.TOKENS):
            raise ConfigError(
                f"data.paths: {path} is no file of text; make rows of it with `diloco "
                f"data prepare OUT {path}`, or name it .txt to train on its bytes"
            )
        if tokenised and kind is SourceKind.TEXT:
            raise ConfigError(
                f"data.paths: {tokenised[0]} has tokens, and {path} is text; give "
                f"files of one kind"
            )
    of_bytes = not tokenised
    documents: dict[str, np.ndarray] = {}
    digest, largest = hashlib.sha256(), 0
    for name, path, kind in used:
        name_bytes, file = encoded(name, path), read_file(path, kind, samples)
        size, largest = len(file.values), max(largest, file.largest)
        if not of_bytes:
            digest.update(name_bytes + b":" + file.digested)
        elif size:
            digest.update(f"{len(name_bytes)}:{name}:{size}:".encode())
            digest.update(file.digested)
        if size:
            documents[name] = file.values
    if not documents:
        raise ConfigError(
            f"data.paths: no {'text' if of_bytes else 'tokens'} in "
            f"{', '.join(file.name for file in used)}; name files or folders that hold "
            f"some"
        )
    sides = _split(documents, validation_fraction, of_bytes)
    train, validation = map(_row if of_bytes else TokenRow, sides)
    return Corpus(
        train,
        validation,
        digest.hexdigest()[:16],
        tuple(documents),
        largest,
        of_bytes,
    )


def load_checked_corpus(data: DataConfig, *, copied: bool = False) -> Corpus:
    """Load a run's corpus; raise ConfigError if its digest differs from the run's.

    copied: see `load_corpus`. With `data.digest` the files always count as copies.
    """
    copied = copied or bool(data.digest)
    corpus = load_corpus(data.paths, data.validation_fraction, copied=copied)
    if data.tokenizer:
        corpus = _of_tokenizer(corpus, data)
    if data.digest and corpus.digest != data.digest:
        raise ConfigError(
            f"data.digest = {data.digest} in the run's config, but the corpus here "
            f"({', '.join(data.paths) or 'the Python standard library'}) has "
            f"{corpus.digest}; give the run's text (--data.paths), of the same Python "
            f"version if it is the standard library"
        )
    logger.info(
        "%s: %d documents, %s %s to train on, %s to validate on",
        "text" if corpus.of_bytes else "tokens",
        len(corpus.names),
        f"{len(corpus.train):,}",
        "bytes" if corpus.of_bytes else "tokens",
        f"{len(corpus.validation):,}",
    )
    return corpus


def _of_tokenizer(corpus: Corpus, data: DataConfig) -> Corpus:
    """Return the corpus with a digest that tells its tokenizer, too; raise ConfigError
    if its tokens cannot be those of `data.tokenizer`."""
    tokenizer = open_tokenizer(data.tokenizer)
    where = ", ".join(data.paths) or "the Python standard library"
    if corpus.of_bytes:
        raise ConfigError(
            f"data.tokenizer = {data.tokenizer}, but {where} is text, of which every "
            f"byte is a token; make its tokens with `diloco data prepare OUT SOURCES "
            f"--tokenizer {data.tokenizer}`, and give OUT as data.paths"
        )
    if corpus.largest >= tokenizer.vocab_size:
        raise ConfigError(
            f"data.tokenizer = {data.tokenizer} has {tokenizer.vocab_size} tokens, but "
            f"the tokens of {where} go up to {corpus.largest}; give the tokenizer that "
            f"they were made with"
        )
    both = hashlib.sha256(f"{corpus.digest}:{tokenizer.digest}".encode())
    return dataclasses.replace(corpus, digest=both.hexdigest()[:16])


def is_validation(name: str, fraction: float) -> bool:
    """Return True if the document of this name is held out."""
    return place(name) < fraction * 2**64


def place(name: str) -> int:
    """Return a document's place, below 2**64: those below a share are held out."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _split(
    documents: Mapping[str, np.ndarray], fraction: float, of_bytes: bool
) -> list[list[np.ndarray]]:
    """Return documents to train on and to validate on. A text that is cut in two is cut
    at the beginning of a character."""
    held = {name for name in documents if is_validation(name, fraction)}
    if 0 < len(held) < len(documents):
        return [
            [data for name, data in documents.items() if (name in held) is side]
            for side in (False, True)
        ]
    sides: list[list[np.ndarray]] = [[], []]
    for data in documents.values():
        at = len(data) - math.ceil(len(data) * fraction)
        while of_bytes and at > 0 and data[at] & 0xC0 == 0x80:
            at -= 1
        for side, part in zip(sides, (data[:at], data[at:]), strict=True):
            side += [part] * (len(part) > 0)
    return sides


def _row(documents: Sequence[np.ndarray]) -> Tokens:
    """Return the documents as one row, each with a separator after it. Small ones are
    copied together; mapped ones stay where they are."""
    end = np.array([SEPARATOR], np.uint8)
    parts, together = [], [np.zeros(0, np.uint8)]
    for document in documents:
        if isinstance(document, np.memmap):
            parts += [np.concatenate(together), document]
            together = [end]
        else:
            together += [document, end]
    parts.append(np.concatenate(together))
    return parts[0] if len(parts) == 1 else TokenRow(parts)


class Windows:
    """Source of training windows.

    Window i holds tokens [i T, (i + 1) T]: neighbours share one token, and every
    token but the first is predicted once per epoch. Tokens at the end that do not fill
    a window are not trained on.
    """

    fields: ClassVar[Fields] = {"tokens": TOKENS}

    def __init__(self, tokens: Tokens, sequence_length: int):
        """tokens: integers [tokens]. ConfigError if they do not fill one window."""
        if len(tokens) <= sequence_length:
            raise ConfigError(
                f"the training text has {len(tokens)} tokens (of text, bytes), but one "
                f"window at sequence_length = {sequence_length} takes "
                f"{sequence_length + 1}; give more text (data.paths) or lower "
                f"sequence_length"
            )
        self._length = sequence_length
        self._tokens = tokens

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def parts(self, count: int) -> list[Windows]:
        """Cut the tokens into that many parts, and each into windows of its own."""
        bounds = cut(len(self._tokens), count)
        return [Windows(self._tokens[a:b], self._length) for a, b in bounds]

    def __getitem__(self, row: int) -> Row:
        start = row * self._length
        window = self._tokens[start : start + self._length + 1]
        return {"tokens": window.astype(np.int32)}


class ValidationWindows:
    """Source of windows in which every token but the first is predicted exactly once.

    The last one is filled up with zeros, and nothing is predicted there.
    """

    fields: ClassVar[Fields] = {"tokens": TOKENS, "weights": WEIGHTS}

    def __init__(self, tokens: Tokens, sequence_length: int):
        """tokens: integers [tokens]. ConfigError if there is nothing to predict."""
        if len(tokens) < 2:
            raise ConfigError(
                f"the validation text has {len(tokens)} tokens (of text, bytes), but 2 "
                f"are needed to predict one; raise data.validation_fraction or give "
                f"more text (data.paths)"
            )
        self._length = sequence_length
        self._tokens = tokens

    def __len__(self) -> int:
        return -(-(len(self._tokens) - 1) // self._length)

    def __getitem__(self, row: int) -> Row:
        length, start = self._length, row * self._length
        text = self._tokens[start : start + length + 1]
        tokens = np.zeros(length + 1, np.int32)
        tokens[: len(text)] = text
        weights = (np.arange(length) < len(text) - 1).astype(np.float32)
        return {"tokens": tokens, "weights": weights}
