"""Configs as a command line makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.config import Config
from diloco_jax.config.loading import read_config
from diloco_jax.config.options import parse_with_config


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """The options of a command that has none of its own."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config at `path` with fields replaced by `overrides`, validated."""
    prog = f"diloco run {path}"
    return parse_with_config(read_config(path), overrides, NoOptions(), prog)[0]
