"""The record of a packed row, as it is stored.

`T` tokens are predicted of each row. A record has, in this order and little-endian:

- the number of tokens without padding, uint32;
- the tokens [T + 1], uint16 if the vocabulary fits, else uint32;
- a bit for each token, set where a document begins [T + 1];
- a bit for each prediction, set where it counts [T].

All records of a folder have the same length.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from diloco_jax.data.source import Row


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """Records of one sequence length and vocabulary."""

    sequence_length: int
    vocab_size: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of a token."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @property
    def nbytes(self) -> int:
        """Length of a record."""
        length = self.sequence_length
        return (
            4
            + (length + 1) * self.dtype.itemsize
            + -(-(length + 1) // 8)
            + (-(-length // 8))
        )

    def encode(self, parts: list[tuple[np.ndarray, np.ndarray]]) -> bytes:
        """Return the record of documents, or pieces of them, side by side.

        parts: tokens, integers [n], and for each of them whether its prediction counts,
        bool [n]; the first of a part is never predicted.
        """
        length = self.sequence_length
        tokens = np.zeros(length + 1, self.dtype)
        starts, counts = np.zeros((2, length + 1), bool)
        at = 0
        for part, learned in parts:
            end = at + len(part)
            tokens[at:end] = part
            counts[at:end] = learned
            starts[at], counts[at] = True, False
            at = end
        bits = np.packbits(starts).tobytes() + np.packbits(counts[1:]).tobytes()
        return at.to_bytes(4, "little") + tokens.tobytes() + bits

    def decode(self, record: bytes) -> Row:
        """Return the arrays of a record, as `source.TOKENS` and its neighbours say.

        Raises ValueError if it has another length.
        """
        if len(record) != self.nbytes:
            raise ValueError(
                f"a record has {len(record)} bytes, {self.nbytes} are those of "
                f"{self.sequence_length} predicted tokens"
            )
        length, size = self.sequence_length, self.dtype.itemsize
        used = int.from_bytes(record[:4], "little")
        bits = 4 + (length + 1) * size
        middle = bits + -(-(length + 1) // 8)
        tokens = np.frombuffer(record, self.dtype, length + 1, 4).astype(np.int32)
        starts = _unpacked(record[bits:middle], length + 1)
        segments = np.cumsum(starts, dtype=np.int32)
        segments[used:] = 0
        weights = _unpacked(record[middle:], length).astype(np.float32)
        return {"tokens": tokens, "segments": segments, "weights": weights}


def _unpacked(data: bytes, count: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(data, np.uint8), count=count)
