"""Paths that mean the same in any folder, and errors that name their file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from diloco_jax.errors import UNNAMEABLE, ConfigError

S3 = "s3://"


class StorageAway(Exception):  # noqa: N818
    """A bucket did not answer. That is temporary, so the supervisor tries again."""


def is_bucket(folder: str) -> bool:
    """Return True for gs://BUCKET/FOLDER and s3://BUCKET/FOLDER, False for a folder of
    this machine."""
    return "://" in folder


def expand(path: str | Path) -> Path:
    """Replace `~` by the user's folder; raise ConfigError if there is none, or if no
    file can have this name."""
    try:
        expanded = Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path}: {error} Write the folder's whole name, or ./{path} for a folder "
            f"of that name"
        ) from error
    try:
        os.stat(expanded)
    except ValueError as error:
        raise ConfigError(f"path {str(path)!r}: {error}; give another") from error
    except OSError as error:
        if error.errno in UNNAMEABLE:
            named = f"path {str(path)[:60]!r}, of {len(str(path))} characters"
            raise ConfigError(f"{named}: {error.strerror}; give another") from error
    return expanded


def of_home(variable: str, otherwise: str) -> Path:
    """Return the folder that a variable names or, without it, another one, in the
    user's home; raise FileNotFoundError if the user has none."""
    try:
        return Path(os.environ.get(variable) or otherwise).expanduser()
    except RuntimeError as error:
        raise FileNotFoundError(f"{error} Set HOME or {variable}.") from error


def absolute(path: str) -> str:
    """Make a local path absolute, `~` included; return a bucket or "" unchanged."""
    if not path or is_bucket(path):
        return path
    return str(expand(path).absolute())


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Give an OSError raised inside this file's name; errors of writing have none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
