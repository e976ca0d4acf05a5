"""A config with one field changed, by the field's name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from diloco_jax.config.fields import check_fields
from diloco_jax.errors import ConfigError, suggest

SECTIONS = ("run", "placement")
"""Sections whose fields go by their own names, as on the command line."""


def replaced(config: Any, name: str, value: Any) -> Any:
    """Return a copy of a config in which the field of this dotted name has this value.

    Raises ConfigError if there is no such field, or the value is not one for it. Rules
    between several fields are not checked.
    """
    head, _, rest = name.partition(".")
    for section in SECTIONS:
        if head in _names(getattr(config, section)):
            head, rest = section, name
    if head not in _names(config):
        raise _unknown(name, config)
    if not rest:
        # Rules of a whole section are checked where the config is used.
        return dataclasses.replace(config, **{head: value})
    own = _with(getattr(config, head), rest, value, name)
    return dataclasses.replace(config, **{head: own})


def _with(section: Any, path: str, value: Any, name: str) -> Any:
    """Return the section or dict with the value at `path`; `name` is for messages."""
    head, _, rest = path.partition(".")
    known = list(section) if isinstance(section, dict) else _names(section)
    if head not in known:
        found = f"{name.removesuffix(path)}{head}"
        raise ConfigError(
            f"no field {found!r} in this config{suggest(head, known)}; "
            f"there are {', '.join(known)}"
        )
    own = section[head] if isinstance(section, dict) else getattr(section, head)
    if rest:
        if not isinstance(own, dict) and not dataclasses.is_dataclass(own):
            raise ConfigError(
                f"{name}: {name.removesuffix(f'.{rest}')} is a value, {own!r}, and has "
                f"no fields"
            )
        value = _with(own, rest, value, name)
    elif type(own) is not type(value) and dataclasses.is_dataclass(own):
        raise ConfigError(f"{name} = {value!r}: give a {type(own).__name__}")
    if isinstance(section, dict):
        return section | {head: value}
    made = dataclasses.replace(section, **{head: value})
    if not rest:
        check_fields(made, name.removesuffix(head))
    return made


def _unknown(name: str, config: Any) -> ConfigError:
    known = list(_paths(config))
    return ConfigError(
        f"no field {name!r} in this config{suggest(name, known)}; the help of any "
        f"command that takes a config lists them all (diloco run --help)"
    )


def _paths(config: Any, prefix: str = "") -> Iterator[str]:
    """Yield the name of every field, sections of `SECTIONS` without their own."""
    for head in _names(config):
        own = getattr(config, head)
        yield f"{prefix}{head}"
        inner = "" if not prefix and head in SECTIONS else f"{prefix}{head}."
        if dataclasses.is_dataclass(own):
            yield from _paths(own, inner)
        elif isinstance(own, dict):
            for key, value in own.items():
                if dataclasses.is_dataclass(value):
                    yield from _paths(value, f"{inner}{key}.")


def _names(section: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(section)]
