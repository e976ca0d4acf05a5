"""Files of text: UTF-8, a byte a token. Large ones are mapped into memory.

A large file is read as a whole once, for its manifest (`manifest.py`); after that, only
the text that is trained on. The mark with which some systems begin a file (BOM) is no
part of its text.
"""

from __future__ import annotations

import codecs
import dataclasses
import pathlib

import numpy as np

from diloco_jax import files
from diloco_jax.config import ConfigError
from diloco_jax.data import manifest
from diloco_jax.data.documents import unreadable

LONGEST_REST = 3
"""Bytes of a character after its first."""
BOM = codecs.BOM_UTF8
CONVERTED = "convert it to UTF-8 or leave it out"
PACKED = (b"\x1f\x8b", b"BZh", b"PK\3\4", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")
BEGINNINGS = {
    (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE): ("it is UTF-32", CONVERTED),
    (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE): ("it is UTF-16", CONVERTED),
    PACKED: ("it is compressed", "unpack it"),
    (b"\x93NUMPY",): ("it has tokens", "give it as data.paths"),
    (b"PAR1",): ("it is Parquet", "name it .parquet"),
    (b"%PDF-",): ("it is PDF", "convert it to text"),
}
"""Beginnings of files that are no text: the kind of file, and the remedy."""


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
            data = data.removeprefix(BOM)
            return TextFile(np.frombuffer(data, np.uint8), data)
        text = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise unreadable(error) from error
    digest = manifest.described(path, text, _check, samples).digest
    if bytes(text[: len(BOM)]) == BOM:  # The manifest is of the whole file.
        return TextFile(text[len(BOM) :], digest + BOM)
    return TextFile(text, digest)


def make_text_manifest(path: pathlib.Path) -> manifest.Manifest:
    """Read the whole file and write its manifest, even if it has one."""
    return manifest.make(path, np.memmap(path, np.uint8, mode="r"), _check)


def require_text(
    data: bytes, path: str | pathlib.Path, at: int, field: str = "data.paths"
) -> None:
    """Raise ConfigError, naming file and remedy, if bytes from `at` on are no text."""
    if wrong := fault(data, at):
        raise ConfigError(f"{field}: {path} is not text: {'; '.join(wrong)}")


def fault(data: bytes, at: int) -> tuple[str, str] | None:
    """Say why the bytes of a file from `at` on are no text, and the remedy; None if
    they are."""
    if not at and files.is_pointer(data):
        return files.POINTED, "or leave it out"
    offset, problem = data.find(b"\0"), "a NUL byte"
    try:
        data.decode()
    except UnicodeDecodeError as error:
        if offset < 0 or error.start < offset:
            offset, problem = error.start, "a byte that is not UTF-8"
    if offset < 0:
        return None
    for marks, found in BEGINNINGS.items():
        if not at and data.startswith(marks):
            return found
    return f"{problem} at offset {at + offset}", CONVERTED


def _check(path: pathlib.Path, text: np.ndarray, part: slice) -> int:
    """Raise ConfigError unless a part is text; return its largest byte. A character
    counts to the part in which it begins."""
    start = _begin(text, part.start)
    require_text(text[start : _begin(text, part.stop)].tobytes(), path, start)
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
