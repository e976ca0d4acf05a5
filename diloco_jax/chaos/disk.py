"""A disk that others fill to the last byte."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

BALLAST = "ballast"
"""Name of the file that takes the space, in the workdir."""
LARGEST_BYTES = 1 << 30
"""Largest free space that `fill` takes: on a larger disk, others may need it."""
PIECE_BYTES = 1 << 20


def fill(folder: Path) -> bool:
    """Take all the free space of the file system; return False, and take none, if it
    has more than LARGEST_BYTES."""
    if os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize > LARGEST_BYTES:
        return False
    with (folder / BALLAST).open("wb", buffering=0) as file:
        for size in (PIECE_BYTES, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))
    return True


def free(folder: Path) -> None:
    """Give the space back that `fill` took."""
    (folder / BALLAST).unlink(missing_ok=True)
