"""Tokens that were made beforehand: `.npy` files, large ones mapped into memory.

A file is one document, like a text file. It is one row of integers, as `numpy.save`
writes it; its maker puts the separators into it. A large file is read as a whole once,
for its manifest (`manifest.py`); after that, only the tokens that are trained on.
"""

from __future__ import annotations

import dataclasses
import errno
import pathlib
from collections.abc import Sequence

import numpy as np
from numpy.lib import format

from diloco_jax.config import ConfigError
from diloco_jax.data import manifest

SUFFIX = ".npy"
MOST = 2**31 - 1
"""Highest token."""


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
    """One file of tokens, mapped, [tokens]. `digest`: of its type and contents."""

    tokens: np.ndarray
    digest: bytes
    largest: int


def read_token_file(path: pathlib.Path, samples: int | None = None) -> TokenFile:
    """Map a file, and check every token once, which its manifest remembers. Raise
    ConfigError, naming the file, if it is not a row of token numbers.

    samples: see `manifest.described`.
    """
    tokens = _open(path)
    found = manifest.described(path, tokens, _check, samples)
    return TokenFile(tokens, found.digest, found.largest)


def make_token_manifest(path: pathlib.Path) -> manifest.Manifest:
    """Read the whole file and write its manifest, even if it has one."""
    return manifest.make(path, _open(path), _check)


def _open(path: pathlib.Path) -> np.ndarray:
    try:
        if manifest.is_large(path):
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


def _check(path: pathlib.Path, tokens: np.ndarray, part: slice) -> int:
    """Raise ConfigError for a negative or too large token; return the largest."""
    low, high = int(tokens[part].min()), int(tokens[part].max())
    if low < 0 or high > MOST:
        wrong = low if low < 0 else high
        raise ConfigError(
            f"data.paths: {path} has {wrong} as a token; they are from 0 to {MOST}"
        )
    return high
