"""A failing row of moves is made as short as its failure allows."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from fuzz_support import Move

SHRINK_S = 60.0


def shrink(moves: Sequence[Move], fails: Callable[[list[Move]], bool]) -> list[Move]:
    """Leave out what is not needed for the same failure, for as long as `SHRINK_S`; the
    last move is the failing one. fails: tells if these moves fail likewise."""
    kept, size = list(moves), max(len(moves) // 2, 1)
    until = time.monotonic() + SHRINK_S
    while size:
        stop = len(kept) - 1
        while stop > 0 and time.monotonic() < until:
            begin = max(stop - size, 0)
            shorter = kept[:begin] + kept[stop:]
            if fails(shorter):
                kept = shorter
            stop = begin
        size //= 2
    return [*kept[:-1], _simpler(kept, fails, until)]


def _simpler(
    moves: list[Move], fails: Callable[[list[Move]], bool], until: float
) -> Move:
    """Leave out the fields of the last message that are not needed."""
    last = moves[-1]
    with contextlib.suppress(Exception):
        fields = msgspec.msgpack.decode(last.frames[0])
        for path in [p for p in paths(fields) if len(p) == 1 or p[0] != "run"]:
            if time.monotonic() > until:
                break
            less = without(fields, path)
            raw = (msgspec.msgpack.encode(less), *last.frames[1:])
            if fails([*moves[:-1], last._replace(frames=raw)]):
                fields, last = less, last._replace(frames=raw)
    return last


def paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values inside a decoded message, the inner ones last."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield (*before, key)
        yield from paths(inner, (*before, key))


def without(value: Any, path: tuple[Any, ...]) -> Any:
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return copy
