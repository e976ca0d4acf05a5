"""Pack documents into rows of equal length.

`T` tokens are predicted of each row, which has T + 1. A long document is cut into
pieces; each begins with the last token of the piece before, so that every token but the
document's first is predicted once. Short pieces share rows.
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
    """Yield the pieces of a document, at most T + 1 tokens each. Leave out a piece of
    which no prediction counts.
    """
    tokens, learned = document
    for start in range(0, max(len(tokens) - 1, 0), sequence_length):
        part = slice(start, start + sequence_length + 1)
        if learned[part][1:].any():
            yield Tokenised(tokens[part], learned[part])


def pack(
    documents: Iterable[Tokenised], sequence_length: int
) -> Iterator[Sequence[Tokenised]]:
    """Yield the pieces of one row after the other.

    A piece that fills a row comes at once. All others come at the end: from the longest
    on, each is put into the fullest row with room for it.
    """
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
