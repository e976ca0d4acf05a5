"""Paths that mean the same in any folder, and errors that name theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from diloco_jax.errors import ConfigError


class StorageAway(Exception):  # noqa: N818
    """A bucket did not answer, which passes: whoever supervises tries again."""


def is_bucket(folder: str) -> bool:
    """Whether it is no folder of this machine: gs://BUCKET/FOLDER."""
    return "://" in folder


def expand(path: str | Path) -> Path:
    """With `~` as the user's folder; ConfigError if there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: {error} Write the folder's whole name, or ./{path} for what is "
            f"called so"
        ) from error


def absolute(path: str) -> str:
    """With `~` as the user's folder; a bucket, and none, as it is."""
    if not path or is_bucket(path):
        return path
    return str(expand(path).absolute())


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Inside, an OSError names this file if it names none: those of writing do not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
