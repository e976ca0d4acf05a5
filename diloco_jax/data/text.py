"""Files of text: UTF-8, a byte a token. Large ones are mapped into memory.

A large file is read as a whole once, for its manifest (`manifest.py`); after that, only
the text that is trained on.
"""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np

from diloco_jax.config import ConfigError
from diloco_jax.data import manifest
from diloco_jax.data.documents import unreadable

LONGEST_REST = 3
"""Bytes of a character after its first."""


@dataclasses.dataclass(frozen=True)
class TextFile:
    """One file of text, uint8 [bytes]; a large one is mapped.

    digested: its part of the corpus's digest: the text itself or, for a large file, a
    digest.
    """

    text: np.ndarray
    digested: bytes


def read_text_file(path: pathlib.Path, samples: int | None = None) -> TextFile:
    """Read a small file; map a large one, and check it once, which its manifest
    remembers. Raise ConfigError, naming the file, if it is not text.

    samples: see `manifest.described`.
    """
    try:
        if not manifest.is_large(path):
            data = path.read_bytes()
            small = np.frombuffer(data, np.uint8)
            _check(path, small, slice(0, len(small)))
            return TextFile(small, data)
        text = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise unreadable(error) from error
    return TextFile(text, manifest.described(path, text, _check, samples).digest)


def make_text_manifest(path: pathlib.Path) -> manifest.Manifest:
    """Read the whole file and write its manifest, even if it has one."""
    return manifest.make(path, np.memmap(path, np.uint8, mode="r"), _check)


def _check(path: pathlib.Path, text: np.ndarray, part: slice) -> int:
    """Raise ConfigError unless a part is text; return its largest byte. A character
    counts to the part in which it begins."""
    start = _begin(text, part.start)
    data = text[start : _begin(text, part.stop)].tobytes()
    offset = data.find(b"\0")
    problem = "a NUL byte"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if offset < 0 or error.start < offset:
            offset, problem = error.start, "a byte that is not UTF-8"
    if offset >= 0:
        raise ConfigError(
            f"data.paths: {path} is not text: {problem} at offset {start + offset}; "
            f"convert it to UTF-8 or leave it out"
        )
    return int(text[part].max(initial=0))


def _begin(text: np.ndarray, at: int) -> int:
    """Return the first place at or after `at` where a character begins.

    If no character begins within the next `LONGEST_REST` bytes, the text is not UTF-8:
    return `at`, or the end of the text if that is nearer.
    """
    if at == 0:
        return 0
    for place in range(at, min(at + LONGEST_REST + 1, len(text))):
        if text[place] & 0xC0 != 0x80:
            return place
    return at if at + LONGEST_REST < len(text) else len(text)
