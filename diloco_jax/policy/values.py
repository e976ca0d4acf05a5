"""Frozen values with some fields changed."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def replace(value: T, **changes: Any) -> T:
    """As `dataclasses.replace`, for classes all of whose fields go through `__init__`.

    Decisions consist of little else, and this takes half the time.
    """
    kind = type(value)
    known = _FIELDS.get(kind)
    if known is None:
        known = _FIELDS[kind] = _fields(kind)
    names, read = known
    fields = dict(zip(names, read(value), strict=True))
    fields.update(changes)
    return kind(**fields)


Fields = tuple[tuple[str, ...], Callable[[Any], Any]]

_FIELDS: dict[type, Fields] = {}


def _fields(kind: type[Any]) -> Fields:
    names = tuple(field.name for field in dataclasses.fields(kind))
    assert len(names) > 1, f"{kind} has one field: attrgetter gives no tuple"
    return names, operator.attrgetter(*names)
