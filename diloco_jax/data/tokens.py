"""Tokens that were made beforehand: `.npy` files, large ones mapped into memory.

A file is one document, like a text file. It is one row of integers, as `numpy.save`
writes it; its maker puts the separators into it. A large file is read as a whole once,
for its manifest (`manifest.py`); after that, only the tokens that are trained on.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import pathlib
from collections.abc import Sequence

import numpy as np
from numpy.lib import format

from diloco_jax.config import ConfigError
from diloco_jax.data import manifest

logger = logging.getLogger(__name__)

SUFFIX = ".npy"
MAPPED_FROM = 1 << 24
"""Bytes from which a file is mapped. Mapped files stay open, and those are limited."""


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
class TokenFile:
    """One file. `tokens`: mapped, [tokens]; `digest`: of its type and contents."""

    tokens: np.ndarray
    digest: bytes
    largest: int


def read_token_file(path: pathlib.Path, samples: int | None = None) -> TokenFile:
    """Map a file, and check every token once, which its manifest remembers. Raise
    ConfigError, naming the file, if it is not a row of token numbers.

    samples: chunks to check of a file that is not its manifest's by the time of change;
    a difference is an error. None: such a file is read anew.
    """
    return _described(path, _open(path), samples)


def make_manifest(path: pathlib.Path) -> TokenFile:
    """Read the whole file, whatever a manifest says of it, and write its manifest."""
    tokens = _open(path)
    made = manifest.make(path, tokens)
    manifest.keep(path, made)
    return TokenFile(tokens, made.digest, made.largest)


def _open(path: pathlib.Path) -> np.ndarray:
    try:
        if path.stat().st_size >= MAPPED_FROM:
            tokens: np.ndarray = format.open_memmap(path, mode="r")
        else:
            with path.open("rb") as file:
                tokens = format.read_array(file, allow_pickle=False)
    except Exception as error:
        # numpy parses a header as Python, so errors are of many kinds.
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise ConfigError(
                f"data.paths: {path} is one file too many to be open at a time; join "
                f"some, or raise `ulimit -n`"
            ) from error
        raise ConfigError(
            f"data.paths: {path} cannot be read as an array of numpy ({error}); write "
            f"it with numpy.save"
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"data.paths: {path} has shape {tokens.shape} and type {tokens.dtype}; "
            f"tokens are one row of integers"
        )
    return tokens


def _described(
    path: pathlib.Path, tokens: np.ndarray, samples: int | None
) -> TokenFile:
    """Take digest and largest token from the manifest, or else from the tokens."""
    large = path.stat().st_size >= MAPPED_FROM
    found = manifest.find(path) if large else None
    if found is not None and not manifest.is_unchanged(path, found):
        if samples is not None:
            manifest.require_same(path, found, tokens, samples)
        else:
            logger.info("%s has changed since its manifest: it is read again", path)
            found = None
    if found is None:
        found = manifest.make(path, tokens)
        if large:
            manifest.keep(path, found)
    return TokenFile(tokens, found.digest, found.largest)
