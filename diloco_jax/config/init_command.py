"""`diloco init FILE [--like CONFIG] [--all]`: a config as Python.

Above each field stands its help text.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diloco_jax.config.config import Config
from diloco_jax.config.fields import positional, setting
from diloco_jax.config.loading import named_configs, read_config, title_of_named
from diloco_jax.config.options import parse
from diloco_jax.errors import ConfigError


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
    known = "; ".join(f"{name}: {title_of_named(name)}" for name in named_configs())
    (options,) = parse(
        [InitOptions],
        arguments,
        "diloco init",
        f"Write a commented config to start from. Configs with a name: {known}",
    )
    file = options.file
    if file.name.strip(".") and not file.suffix:
        file = file.with_suffix(".py")
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


WIDTH = 88
SECTION = re.compile(r"^ *(?:return |\w+=|\"[^\"]*\": )?(\w+)\($", re.MULTILINE)
"""A line that begins the call of a section's class, and the name of that."""
MAIN = {
    "RunConfig": ("sequence_length", "total_tokens", "seed"),
    "ModelConfig": ("d_model", "num_layers", "vocab_size"),
    "DataConfig": ("paths",),
    "InnerConfig": ("optimizer", "learning_rate"),
    "SyncConfig": ("fragments", "steps_per_cycle", "quorum", "codec_up", "codec_down"),
    "IslandConfig": ("batch_size", "mesh_fsdp", "hosts"),
    "Placement": ("workdir", "certificates"),
}
"""Fields that are written whatever their value is, by section."""


def render(config: Config, title: str, *, whole: bool = False) -> str:
    """Return the source of a configs file that gives this config.

    Args:
      config: fields that differ from their defaults are written, and those of `MAIN`.
      title: first line of the file's docstring.
      whole: write every field.
    """
    body = list(_call(config, "    ", whole, set()))
    body[0] = f"    return {body[0].strip()}"
    sections = sorted(set(SECTION.findall("\n".join(body))))
    lines = [
        f'"""{title}"""',
        "",
        "from diloco_jax.config import (",
        *(f"    {section}," for section in sections),
        ")",
        "",
        "",
        "def config() -> Config:",
        '    """Return the run, its islands and where they are."""',
        *body,
    ]
    lines[-1] = lines[-1].rstrip(",")
    return "\n".join(lines) + "\n"


def _call(section: Any, indent: str, whole: bool, explained: set[str]) -> Iterator[str]:
    """Yield the lines of a dataclass's constructor, the last one with a comma.

    explained: fields whose help was given, which islands share; it is added to.
    """
    kind, inner = type(section).__name__, indent + "    "
    yield f"{indent}{kind}("
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if not (whole or _matters(section, field, value)):
            continue
        name = f"{kind}.{field.name}"
        if name not in explained:
            text = field.metadata.get("help", "")
            for line in textwrap.wrap(text, WIDTH - len(inner) - 2):
                yield f"{inner}# {line}"
        explained.add(name)
        first, *rest = _value(value, inner, whole, explained)
        yield f"{inner}{field.name}={first.strip()}"
        yield from rest
    yield f"{indent}),"


def _value(value: Any, indent: str, whole: bool, explained: set[str]) -> Iterator[str]:
    """Yield the lines of a value, the last one with a comma."""
    if dataclasses.is_dataclass(value):
        yield from _call(value, indent, whole, explained)
    elif isinstance(value, dict) and value:
        yield f"{indent}{{"
        for key, item in value.items():
            first, *rest = _value(item, indent + "    ", whole, explained)
            yield f"{indent}    {_literal(key)}: {first.strip()}"
            yield from rest
        yield f"{indent}}},"
    else:
        yield f"{indent}{_literal(value)},"


def _literal(value: Any) -> str:
    """Return a value as code, with the quotes that formatters choose."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        parts = ", ".join(map(_literal, value))
        return f"({parts},)" if len(value) == 1 else f"({parts})"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:_}" if value >= 10_000 else str(value)
    return repr(value)


def _matters(section: Any, field: dataclasses.Field[Any], value: Any) -> bool:
    if field.name in MAIN.get(type(section).__name__, ()):
        return True
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if dataclasses.is_dataclass(value) and type(value).__name__ in MAIN:
        return True
    return bool(value != default)
