"""Documents become rows: long ones are cut, and the rest of them fills rows together.

`T` tokens predicted of a row, which has T + 1. A cut document goes on with the token
that ended the row before, so that every token but a document's first is predicted once.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Tokenised(NamedTuple):
    """A document, or a piece of one. Both [n]: tokens, int32, and whether the
    prediction of each counts, bool."""

    tokens: np.ndarray
    learned: np.ndarray


def pieces(document: Tokenised, sequence_length: int) -> Iterator[Tokenised]:
    """Yield pieces of at most T + 1 tokens, without those of which no prediction
    counts."""
    tokens, learned = document
    for start in range(0, max(len(tokens) - 1, 0), sequence_length):
        part = slice(start, start + sequence_length + 1)
        if learned[part][1:].any():
            yield Tokenised(tokens[part], learned[part])


def pack(
    documents: Iterable[Tokenised], sequence_length: int
) -> Iterator[Sequence[Tokenised]]:
    """Yield the pieces of each row: first those that fill one, as they come; at the
    end, from the longest on, each in the fullest row that has room for it."""
    size, left = sequence_length + 1, list[Tokenised]()
    for document in documents:
        for piece in pieces(document, sequence_length):
            if len(piece.tokens) == size:
                yield [piece]
            else:
                left.append(piece)
    left.sort(key=lambda piece: -len(piece.tokens))  # Stable, so it is repeatable.
    open_rows: dict[int, list[list[Tokenised]]] = {}
    rooms: list[int] = []  # Those of the open rows, ascending.
    for piece in left:
        need = len(piece.tokens)
        at = bisect.bisect_left(rooms, need)
        if at == len(rooms):
            row, room = [piece], size - need
        else:
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
            row.append(piece)
            room -= need
        if room < 2:  # Nothing is predicted in a single token.
            yield row
            continue
        if room not in open_rows:
            open_rows[room] = []
            bisect.insort(rooms, room)
        open_rows[room].append(row)
    for room in rooms:
        yield from open_rows[room]
