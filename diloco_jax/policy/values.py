"""Frozen values with some fields changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def replace(value: T, **changes: Any) -> T:
    """As `dataclasses.replace`, for classes with slots and without `__post_init__`.

    Decisions consist of little else, and this takes a quarter of the time.
    """
    kind = type(value)
    copy = _COPY.get(kind)
    if copy is None:
        copy = _COPY[kind] = _make_copy(kind)
    new: T = copy(value, changes)
    return new


_COPY: dict[type, Callable[[Any, dict[str, Any]], Any]] = {}


def _make_copy(kind: type[Any]) -> Callable[[Any, dict[str, Any]], Any]:
    """A function made for one class, as `dataclasses` makes its methods: every field
    is written through its slot, which works though the class is frozen."""
    names = [field.name for field in dataclasses.fields(kind)]
    writes = {name: getattr(kind, name).__set__ for name in names}
    lines = [f"    write_{name}(new, value.{name})" for name in names]
    source = "\n".join(
        [
            "def copy(value, changes):",
            "    new = make(kind)",
            *lines,
            "    for name, field in changes.items():",
            "        writes[name](new, field)",
            "    return new",
        ]
    )
    scope: dict[str, Any] = {"kind": kind, "make": object.__new__, "writes": writes}
    scope |= {f"write_{name}": write for name, write in writes.items()}
    exec(source, scope)
    copy: Callable[[Any, dict[str, Any]], Any] = scope["copy"]
    return copy
