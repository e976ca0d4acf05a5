"""The numbers that a message may carry, and the largest of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import inspect


def numbers_of(kind: Any) -> Iterator[tuple[str, str, float | None]]:
    """Yield (struct, field, largest value; None: any) of every number in a message."""
    yield from _of(inspect.type_info(kind), "", "", set())


def _of(
    kind: inspect.Type, owner: str, name: str, seen: set[Any]
) -> Iterator[tuple[str, str, float | None]]:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            yield owner, name, kind.le
        case inspect.StructType() | inspect.NamedTupleType() if kind.cls not in seen:
            seen.add(kind.cls)
            for field in kind.fields:
                yield from _of(field.type, kind.cls.__name__, field.name, seen)
        case inspect.UnionType():
            for one in kind.types:
                yield from _of(one, owner, name, seen)
        case inspect.VarTupleType() | inspect.ListType():
            yield from _of(kind.item_type, owner, name, seen)
        case inspect.TupleType():
            for one in kind.item_types:
                yield from _of(one, owner, name, seen)
        case inspect.DictType():
            yield from _of(kind.value_type, owner, name, seen)
