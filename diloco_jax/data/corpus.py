"""Text or token files as two long rows of tokens: to train on, and to validate on.

A document is a file. Its name is the path relative to what was given, so the same
files give the same corpus, split and digest on every machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import os
import pathlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from diloco_jax.config import ConfigError, DataConfig, ModelConfig
from diloco_jax.data import manifest
from diloco_jax.data.tokenizer import SEPARATOR, VOCAB_SIZE
from diloco_jax.data.tokens import SUFFIX, TokenRow, Tokens, read_token_file

logger = logging.getLogger(__name__)

DocumentT = TypeVar("DocumentT", bytes, np.ndarray)

# Not every installation has these, or they differ between builds, or they are tables
# and test data rather than text.
SKIPPED_FOLDERS = frozenset(
    (
        *("site-packages", "dist-packages", "__pycache__", "test", "tests"),
        *("encodings", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo"),
    )
)
MANIFEST = SUFFIX + manifest.SUFFIX
"""End of names of manifests, which are no documents."""
SAMPLES = 16
"""Chunks of a corpus that a start checks, and at least one of each file."""
SKIPPED_PREFIXES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents in two rows of tokens. A separator follows each document of text.

    `train` and `validation` are integers [tokens], of text uint8; `names` those of all
    documents, in order; `digest` 16 hex digits over names and contents; `largest` the
    highest token; `of_bytes`: tokens are bytes.
    """

    train: Tokens
    validation: Tokens
    digest: str
    names: tuple[str, ...]
    largest: int = VOCAB_SIZE - 1
    of_bytes: bool = True


def load_corpus(
    paths: tuple[str, ...], validation_fraction: float, *, known: bool = False
) -> Corpus:
    """Read the corpus.

    Args:
      paths: text files, and folders in which every regular file counts, hidden ones
        apart; or token files (`tokens.py`); none = the Python standard library's own
        sources.
      validation_fraction: share of the documents held out. A document's side depends
        on its name alone, so new documents move no others. Where that leaves a side
        without any, as with one file, the end of every document is held out.
      known: the run has the corpus's digest already, which is compared. Large files of
        tokens that have manifests are then not read: of a copy, `SAMPLES` chunks are
        checked.

    Raises:
      ConfigError: a file that is not its manifest's, a path that is missing,
        empty or not text, or text beside tokens.
    """
    files = list(_user_files(paths) if paths else _library_files())
    tokenised = [path for _, path in files if path.suffix == SUFFIX]
    if tokenised:
        for _, path in files:
            if path.suffix != SUFFIX:
                raise ConfigError(
                    f"data.paths: {tokenised[0]} has tokens, and {path} is text; give "
                    f"files of one kind"
                )
        return _load_tokens(files, validation_fraction, known)
    documents: dict[str, bytes] = {}
    digest = hashlib.sha256()
    for name, path in files:
        data = _read_text(path)
        if not data:
            continue
        digest.update(f"{len(_encoded(name, path))}:{name}:{len(data)}:".encode())
        digest.update(data)
        documents[name] = data
    if not documents:
        where = ", ".join(paths) or sysconfig.get_path("stdlib")
        raise ConfigError(
            f"data.paths: no text in {where}; name files or folders with text"
        )
    train, validation = _split(documents, validation_fraction, _cut)
    return Corpus(
        _row(train), _row(validation), digest.hexdigest()[:16], tuple(documents)
    )


def _load_tokens(
    files: Sequence[tuple[str, pathlib.Path]], validation_fraction: float, known: bool
) -> Corpus:
    samples = max(1, SAMPLES // len(files)) if known else None
    read, digest = {}, hashlib.sha256()
    for name, path in files:
        encoded = _encoded(name, path)
        read[name] = read_token_file(path, samples)
        digest.update(encoded + b":" + read[name].digest)
    documents = {name: file.tokens for name, file in read.items() if len(file.tokens)}
    if not documents:
        raise ConfigError(f"data.paths: no tokens in {', '.join(read)}")
    train, validation = _split(documents, validation_fraction, _cut_tokens)
    return Corpus(
        TokenRow(train),
        TokenRow(validation),
        digest.hexdigest()[:16],
        tuple(documents),
        max(file.largest for file in read.values()),
        of_bytes=False,
    )


def load_checked_corpus(data: DataConfig) -> Corpus:
    """Load a run's corpus; raise ConfigError if its digest here is another one."""
    corpus = load_corpus(data.paths, data.validation_fraction, known=bool(data.digest))
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


def require_window(nbytes: int, sequence_length: int) -> None:
    """Raise ConfigError if a training text of that length does not fill a window."""
    if nbytes <= sequence_length:
        raise ConfigError(
            f"the training text has {nbytes} bytes, but one window at "
            f"sequence_length = {sequence_length} takes {sequence_length + 1}; "
            f"give more text (data.paths) or lower sequence_length"
        )


def require_prediction(nbytes: int) -> None:
    """Raise ConfigError if a validation text of that length has nothing to predict."""
    if nbytes < 2:
        raise ConfigError(
            f"the validation text has {nbytes} bytes, but 2 are needed to "
            f"predict one; raise data.validation_fraction or give more text "
            f"(data.paths)"
        )


def require_vocabulary(corpus: Corpus, model: ModelConfig) -> None:
    """Raise ConfigError if the bundled model has no place for a token. The vocabulary
    of a user's own model is not known here."""
    if corpus.largest >= model.vocab_size and not model.factory:
        raise ConfigError(
            f"model.vocab_size = {model.vocab_size}, but the tokens go up to "
            f"{corpus.largest}; set it to {corpus.largest + 1} or more"
        )


def is_validation(name: str, fraction: float) -> bool:
    """Return True if the document of this name is held out."""
    head = hashlib.sha256(name.encode()).digest()[:8]
    return int.from_bytes(head, "big") < fraction * 2**64


def _split(
    documents: dict[str, DocumentT],
    fraction: float,
    cut: Callable[[DocumentT, float], tuple[DocumentT, DocumentT]],
) -> tuple[list[DocumentT], list[DocumentT]]:
    """Return documents to train on and to validate on. cut: splits one into both."""
    held = {name for name in documents if is_validation(name, fraction)}
    if 0 < len(held) < len(documents):
        return (
            [data for name, data in documents.items() if name not in held],
            [data for name, data in documents.items() if name in held],
        )
    parts = [cut(data, fraction) for data in documents.values()]
    heads = [head for head, _ in parts if len(head)]
    return heads, [tail for _, tail in parts if len(tail)]


def _cut(data: bytes, fraction: float) -> tuple[bytes, bytes]:
    """Cut a text in two at the beginning of a character."""
    at = len(data) - math.ceil(len(data) * fraction)
    while at > 0 and data[at] & 0xC0 == 0x80:
        at -= 1
    return data[:at], data[at:]


def _cut_tokens(tokens: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    at = len(tokens) - math.ceil(len(tokens) * fraction)
    return tokens[:at], tokens[at:]


def _row(documents: list[bytes]) -> np.ndarray:
    ended = [data + bytes((SEPARATOR,)) for data in documents]
    return np.frombuffer(b"".join(ended), np.uint8)


def _encoded(name: str, path: pathlib.Path) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"data.paths: the name of {os.fsencode(path)!r} is not UTF-8, and the "
            f"split goes by names; rename it"
        ) from error


def _library_files() -> Iterator[tuple[str, pathlib.Path]]:
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for name, path in _walk(root, SKIPPED_FOLDERS):
        if path.suffix == ".py" and not path.name.startswith(SKIPPED_PREFIXES):
            yield name, path


def _user_files(paths: Iterable[str]) -> Iterator[tuple[str, pathlib.Path]]:
    found: dict[str, pathlib.Path] = {}
    for given in paths:
        root = pathlib.Path(given)
        try:
            root.stat()
        except OSError as error:
            raise ConfigError(
                f"data.paths: {given} does not exist ({error.strerror}); name a text "
                f"file or a folder"
            ) from error
        files = _walk(root) if root.is_dir() else [(root.name, root)]
        if not any(path.stat().st_size for _, path in files):
            raise ConfigError(
                f"data.paths: {given} is empty; name a file or folder with text"
            )
        for name, path in files:
            if name in found and found[name].resolve() != path.resolve():
                raise ConfigError(
                    f"data.paths: {found[name]} and {path} are both called {name!r}; "
                    f"rename one, or give the folder that contains both"
                )
            found[name] = path
    yield from sorted(found.items())


def _walk(
    root: pathlib.Path, skipped: frozenset[str] = frozenset()
) -> list[tuple[str, pathlib.Path]]:
    """Return the regular files below root with relative names, in order of the names;
    neither hidden folders nor links to folders are entered."""
    found = []
    for folder, folders, files in os.walk(root, onerror=_refuse):
        folders[:] = [f for f in folders if f not in skipped and f[0] != "."]
        for path in (pathlib.Path(folder, name) for name in folders):
            if path.is_symlink():
                logger.warning(
                    "data.paths: %s is a link to a folder, which is not entered; name "
                    "it as a path of its own if it is meant",
                    path,
                )
        for path in (pathlib.Path(folder, file) for file in files if file[0] != "."):
            if path.is_file() and not path.name.endswith(MANIFEST):
                found.append((path.relative_to(root).as_posix(), path))
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise _unreadable(error) from error


def _unreadable(error: OSError) -> ConfigError:
    return ConfigError(
        f"data.paths: {error.filename} cannot be read ({error.strerror}); check its "
        f"permissions"
    )


def _read_text(path: pathlib.Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(error) from error
    offset = data.find(b"\0")
    problem = "a NUL byte"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if offset < 0 or error.start < offset:
            offset, problem = error.start, "a byte that is not UTF-8"
    if offset >= 0:
        raise ConfigError(
            f"data.paths: {path} is not text: {problem} at offset {offset}; convert "
            f"it to UTF-8 or leave it out"
        )
    return data
