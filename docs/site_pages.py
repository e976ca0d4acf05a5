"""The site's pages that are made of the code."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import shutil
import typing
from pathlib import Path
from typing import Any

import site_formats

import diloco_jax
from diloco_jax import cli
from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    ModelConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
    VisionConfig,
)
from diloco_jax.config.fields import bound_of
from diloco_jax.config.options import paragraph
from diloco_jax.simulation.commands import KINDS

SECTIONS = (
    (RunConfig, ""),
    (ModelConfig, "model."),
    (VisionConfig, "model.vision."),
    (DataConfig, "data."),
    (InnerConfig, "inner."),
    (OuterConfig, "outer."),
    (SyncConfig, "sync."),
    (IslandConfig, "islands.NAME."),
    (Placement, ""),
    (type(Config().launch), "launch."),
)
"""Sections of a config, and what the options of each begin with."""
COLUMNS = "100"


def write_reference(folder: Path) -> None:
    """Write the pages of `folder` anew."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    pages = {
        "commands": commands,
        "configuration": configuration,
        "api": api,
        "wire": site_formats.wire,
        "tape": site_formats.tape,
    }
    for name, make in pages.items():
        (folder / f"{name}.md").write_text(make(), encoding="utf-8")


def commands() -> str:
    """Return a page with the help of every command."""
    parts = ["# Commands\n\nLook up every command and option.\n"]
    for name, (_, usage, does) in cli.COMMANDS.items():
        parts.append(f"## diloco {name}\n\n{does[0].upper()}{does[1:]}.\n")
        if name == "simulate":
            parts += [
                f"### diloco simulate {kind}\n\n{_block(help_of([name, kind]))}"
                for kind in KINDS
            ]
        else:
            parts.append(f"`diloco {name} {usage}`\n\n{_block(help_of([name]))}")
    return "\n".join(parts)


def help_of(command: list[str]) -> str:
    """Return what a command prints for --help."""
    shown = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS
    try:
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            cli.main([*command, "--help"])
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return shown.getvalue()


def configuration() -> str:
    """Return a page with a table of each section's fields."""
    parts = [
        "# Configuration\n",
        "Look up every field of a config, its type, default and bounds, and what it "
        "does.\n",
        "A config is a `diloco_jax.config.Config`: a `RunConfig`, which all islands "
        "share, an `IslandConfig` for each island, a `Placement`, and what "
        "`diloco launch` needs. Each field is an option of the command line by the "
        "name that stands here, with two hyphens in front.\n",
    ]
    for section, prefix in SECTIONS:
        parts += [
            f"## {section.__name__}\n",
            paragraph(section.__doc__),
            "\n| field | type | default | what it is |\n|---|---|---|---|",
        ]
        hints = typing.get_type_hints(section)
        for field in dataclasses.fields(section):
            if "help" not in field.metadata:
                continue
            told = field.metadata["help"]
            if (bound := bound_of(field)) is not None:
                told = f"{told} Range: {bound}."
            cells = (
                f"`{prefix}{field.name}`",
                f"`{_type(hints[field.name])}`",
                f"`{_default(field)!r}`",
                told,
            )
            parts.append(f"| {' | '.join(map(_cell, cells))} |")
        parts.append("")
    return "\n".join(parts)


def api() -> str:
    """Return a page with the public names of the package."""
    lines = [
        "# Python",
        "",
        "Look up every public name, with its arguments, errors and an example.",
        "",
        "What is promised of these names, and longer examples: "
        "[from Python](../docs/python.md). The fields of a config are in the "
        "[configuration](configuration.md).",
        "",
        "```{eval-rst}",
        ".. automodule:: diloco_jax",
        "",
    ]
    for name in diloco_jax.__all__:
        kind = "class" if isinstance(getattr(diloco_jax, name), type) else "function"
        lines.append(f".. auto{kind}:: diloco_jax.{name}")
        if kind == "class":
            lines.append("   :members:")
        lines.append("")
    return "\n".join([*lines, "```", ""])


def short_signature(
    app: Any, what: str, name: str, thing: Any, options: Any, signature: str, gives: str
) -> tuple[str, str] | None:
    """Return a dataclass's signature without its defaults, which fill a screen."""
    if not dataclasses.is_dataclass(thing):
        return None
    return f"({', '.join(field.name for field in dataclasses.fields(thing))})", gives


def plain_blocks(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Turn fenced blocks of a docstring into those of reStructuredText."""
    fenced, made = False, []
    for line in lines:
        if line.strip() == "```":
            fenced = not fenced
            made += ["::", ""] if fenced else [""]
        else:
            made.append(f"    {line}" if fenced else line)
    lines[:] = made


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```\n"


def _type(hint: Any) -> str:
    """Return a type as one would write it, a choice as its values."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(map(repr, typing.get_args(hint)))
    text = (
        hint.__name__
        if isinstance(hint, type) and not typing.get_args(hint)
        else str(hint)
    )
    return re.sub(r"\b(?:typing|diloco_jax(?:\.\w+)*)\.", "", text)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
