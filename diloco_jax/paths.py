"""Paths: what those of a config mean in any folder, and errors that name theirs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from diloco_jax.config import Config, ConfigError, own_code

T = TypeVar("T", bound=Any)


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


def with_absolute_paths(config: Config) -> Config:
    """The config as it is read from any folder."""
    placement = dataclasses.replace(
        config.placement,
        workdir=absolute(config.placement.workdir),
        certificates=absolute(config.placement.certificates),
        checkpoints=absolute(config.placement.checkpoints),
    )
    run = config.run
    data = dataclasses.replace(run.data, paths=tuple(map(absolute, run.data.paths)))
    run = dataclasses.replace(
        run,
        data=data,
        model=_with_absolute_code(run.model),
        sync=_with_absolute_code(run.sync),
        outer=_with_absolute_code(run.outer),
    )
    return dataclasses.replace(config, run=run, placement=placement)


def _with_absolute_code(section: T) -> T:
    """A section of a config with absolute paths to the files that it names."""
    code = {name: absolute(value) for name, value in own_code(section).items()}
    replaced: T = dataclasses.replace(section, **code)
    return replaced
