"""Facts about a field besides its type: bounds, help text, and its option.

`setting` declares a field, `check_fields` holds its value to what was declared, and
`options` shows the same text as the help of a command-line option.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import math
import sys
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from diloco_jax.errors import ConfigError, suggest

T = TypeVar("T")
Section = TypeVar("Section", bound=type)

LARGEST = 2**63 - 1
"""The largest whole number that a message holds."""
LONGEST_S = 1e9
"""Seconds that are longer than any run, and short enough for every clock."""


class Bound(NamedTuple):
    """The range of a number; infinities and NaN are always outside."""

    low: float = 0
    high: float = LARGEST
    above: bool = False
    """True if the lowest value itself is outside."""
    below: bool = False
    """True if the highest value itself is outside."""

    def holds(self, value: float) -> bool:
        """Tell whether the value is inside; False for NaN."""
        over = value > self.low if self.above else value >= self.low
        return over and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.low:g}"
        if self.high == LARGEST:
            return low
        return f"{low}, {'below' if self.below else 'at most'} {self.high:,.15g}"


NOT_NEGATIVE = Bound()
POSITIVE = Bound(above=True)
AT_LEAST_1 = Bound(1)
SOME_SHARE = Bound(0, 1, above=True)
SHARE = Bound(0, 1)
BELOW_1 = Bound(0, 1, below=True)
BETWEEN = Bound(0, 1, above=True, below=True)
SECONDS = Bound(0, LONGEST_S)
SOME_SECONDS = Bound(0, LONGEST_S, above=True)


def setting(
    default: T,
    bound: Bound | None = None,
    *,
    help: str,
    local: bool = False,
    code: bool = False,
    group: str = "",
    option: str | None = None,
    metavar: str | None = None,
) -> T:
    """Declare a dataclass field.

    Args:
      default: its default value; a dict is copied for every instance.
      bound: the range of a number; None, where the type allows it, is always inside.
      help: text for people, also the help of the option; one paragraph.
      local: the value concerns one machine and stays out of the fingerprint.
      code: the value names code; the folder of its file may differ between machines.
      group: heading under which the help lists the option; empty = its section's.
      option: name of the option; None = that of the field.
      metavar: stands in the help for its value; None = the type.
    """
    metadata = {
        "help": help,
        "bound": bound,
        "local": local,
        "code": code,
        "group": group,
        "option": option,
        "metavar": metavar,
    }
    if isinstance(default, dict):
        copied = default.copy()
        return cast(
            T, dataclasses.field(default_factory=copied.copy, metadata=metadata)
        )
    return dataclasses.field(default=default, metadata=metadata)


def positional(*, metavar: str, help: str) -> Any:
    """Declare a dataclass field that a command takes without the name of an option."""
    return dataclasses.field(
        metadata={"help": help, "metavar": metavar, "positional": True}
    )


def explained(section: Section) -> Section:
    """Append type, default, bounds and help of every field to the docstring of a
    dataclass, where `help(SyncConfig)` and a notebook look for them."""
    lines = [str(section.__doc__).rstrip(), "", "    Attributes:"]
    for field in dataclasses.fields(section):
        kind = vars(sys.modules[section.__module__]).get(str(field.type))
        choices = ", ".join(map(repr, _choices(kind)))
        facts = [f"one of {choices}" if choices else str(field.type)]
        default = field.default
        if default is not dataclasses.MISSING and not dataclasses.is_dataclass(default):
            facts.append(f"default {default!r}")
        if (bound := bound_of(field)) is not None:
            facts.append(str(bound))
        text = f"{field.name} ({', '.join(facts)}): {field.metadata.get('help', '')}"
        lines += textwrap.wrap(
            text, 88, initial_indent=" " * 6, subsequent_indent=" " * 8
        )
    section.__doc__ = "\n".join([*lines, "    "])
    return section


def as_html(rows: Mapping[str, object]) -> str:
    """Return a table of names and values for a notebook."""
    cells = (
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def bound_of(field: dataclasses.Field[Any]) -> Bound | None:
    """Return the bounds that a field was declared with."""
    return cast("Bound | None", field.metadata.get("bound"))


def types_of(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, by name."""
    return _types_of(kind)


# Without the cache it takes most of the time of a validation.
_types_of = functools.cache(typing.get_type_hints)


def own_code(section: Any) -> dict[str, str]:
    """List the fields of a section that name something in a file of this machine."""
    values = {
        field.name: getattr(section, field.name)
        for field in dataclasses.fields(section)
        if field.metadata.get("code")
    }
    return {name: value for name, value in values.items() if ".py:" in (value or "")}


def check_fields(config: Any, prefix: str = "") -> None:
    """Compare every field of a dataclass with its type, choices and bounds.

    Fields that are dataclasses need a call of their own. Raises ConfigError with the
    field's name after `prefix`, its value and the allowed ones.
    """
    hints = types_of(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not dataclasses.is_dataclass(value):
            name = f"{prefix}{field.name}"
            _check_type(name, value, hints[field.name])
            bound = bound_of(field)
            if bound is not None and value is not None:
                _check_bound(name, value, bound)


def check_bounds(config: Any) -> None:
    """Hold the numbers of a dataclass to their bounds; raises as `check_fields`."""
    for field in dataclasses.fields(config):
        bound, value = bound_of(field), getattr(config, field.name)
        if bound is not None and value is not None:
            _check_bound(field.name, value, bound)


def within(config: Any, bound: Bound, *fields: str) -> None:
    """Raise ConfigError unless all of these fields are in these bounds."""
    for field in fields:
        _check_bound(field, getattr(config, field), bound)


def check_utf8(name: str, *texts: str) -> None:
    """Raise ConfigError, naming the option, unless texts are UTF-8. A command line may
    have other bytes, which Python takes for half characters."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{name} is not UTF-8: {text[:40]!r}; convert it, and rename a file or "
                f"folder of such a name"
            ) from error


def _check_type(name: str, value: Any, hint: Any) -> None:
    known = _choices(hint)
    if known and value not in known:
        names = list(map(str, known))
        near = suggest(str(value), names)
        raise ConfigError(f"{name} = {value!r}{near}; choose from {', '.join(names)}")
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        meant = ""
        if isinstance(value, str) and typing.get_origin(hint) is tuple:
            meant = f"; write ({value!r},), which is a tuple of one"
        elif hint is str:
            meant = (
                "; write it as text, an object of yours as 'file.py:name', or in a "
                "notebook as '__main__:name'"
            )
        raise ConfigError(f"{name} = {value!r}: {error}{meant}") from error


def _choices(hint: Any) -> tuple[Any, ...]:
    """List the values that a type allows; empty if they cannot be listed."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    found: list[Any] = []
    for member in typing.get_args(hint) if union else (hint,):
        if typing.get_origin(member) is typing.Literal:
            found += typing.get_args(member)
        elif member is type(None):
            found.append(None)
        else:
            return ()
    return tuple(found)


def _check_bound(name: str, value: float, bound: Bound) -> None:
    if not bound.holds(value):
        finite = "" if math.isfinite(value) else "finite, "
        # Nothing else comes near the upper end, so it is named for no other value.
        most = f", at most {LARGEST:.1e}" if LARGEST < value < math.inf else ""
        raise ConfigError(f"{name} = {value}; it must be {finite}{bound}{most}")
