"""`diloco init FILE [--like CONFIG] [--all]`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_jax.config import named
from diloco_jax.config.fields import positional, setting
from diloco_jax.errors import ConfigError
from diloco_jax.options import parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitOptions:
    """The options of `diloco init`."""

    file: Path = positional(metavar="FILE", help="File to write, as in my_run.py.")
    like: str = setting(
        "quickstart",
        metavar="CONFIG",
        help="Config to begin with: a name, a file, or the config.json of a run.",
    )
    all: bool = setting(False, help="Write every field, also those left as they are.")


def init_command(arguments: Sequence[str]) -> int:
    """Write a commented config; an existing file is left alone."""
    known = "; ".join(f"{name}: {named.title(name)}" for name in named.names())
    (options,) = parse(
        [InitOptions],
        arguments,
        "diloco init",
        f"Write a commented config to start from. Configs with a name: {known}",
    )
    from diloco_jax.config.loading import read_config
    from diloco_jax.config.template import render

    file = options.file if options.file.suffix else options.file.with_suffix(".py")
    if file.suffix != ".py":
        raise ConfigError(f"{str(file)!r} is no .py file; give one, as in my_run.py")
    source = render(
        read_config(options.like), f"A run like {options.like}.", whole=options.all
    )
    try:
        with file.open("x", encoding="utf-8") as made:
            made.write(source)
    except FileExistsError as error:
        raise ConfigError(f"{file} exists; give another name, or delete it") from error
    except FileNotFoundError as error:
        raise ConfigError(
            f"{file}: there is no folder {file.parent}; make it, or give another name"
        ) from error
    print(f"{file} is written; next: diloco run {file}", file=sys.stderr)
    return 0
