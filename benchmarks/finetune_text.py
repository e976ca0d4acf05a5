"""The text of the fine-tune: what is trained on, what is held out, and its score.

`N` documents held out, `T` tokens of each.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
from support import DILOCO

from diloco_jax.config import ModelConfig
from diloco_jax.data.documents import find_documents
from diloco_jax.data.tokenizers import Tokenizer, open_tokenizer
from diloco_jax.models.generation import make_likelihood
from diloco_jax.models.model import Params

HELD_OUT_OF = 5
"""One of so many files of the standard library is held out, by its name."""
SHORTEST_BYTES = 2000
ROWS_AT_A_TIME = 4


def prepare(work: Path, weights: Path, sequence_length: int) -> Path:
    """Make packed rows of the files that are not held out; return their folder."""
    text, rows = work / "text", work / "rows"
    for name, path, _ in find_documents(()):
        if not is_held_out(name):
            (text / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, text / name)
    options = ["--sequence-length", str(sequence_length)]
    options += ["--tokenizer", str(weights), "--validation-fraction", "0.01"]
    subprocess.run(
        [*DILOCO, "data", "prepare", str(rows), str(text), *options], check=True
    )
    return rows


def is_held_out(name: str) -> bool:
    """Tell if a file of the standard library is never trained on."""
    return zlib.crc32(name.encode()) % HELD_OUT_OF == 0


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """The beginnings of documents that no run sees."""

    tokens: np.ndarray
    """int32 [N, T]; the first one of a document is not predicted."""
    text_bytes: np.ndarray
    """int64 [N]: bytes of the text that the others are."""

    @classmethod
    def read(cls, weights: Path, documents: int, length: int) -> HeldOut:
        """Read the first `length` tokens of so many documents, spread over all names;
        one whose tokens do not end at the end of a character is left out."""
        tokenizer = open_tokenizer(weights)
        found = []
        for name, path, _ in find_documents(()):
            if is_held_out(name) and path.stat().st_size >= SHORTEST_BYTES:
                found += _beginning(tokenizer, path, length)
        chosen = [found[i * len(found) // documents] for i in range(documents)]
        tokens, sizes = zip(*chosen, strict=True)
        return cls(np.stack(tokens), np.array(sizes))

    def bits(self, model: ModelConfig, params: Params) -> np.ndarray:
        """Return the bits that a model needs for each document, f64 [N]."""
        likelihood = make_likelihood(model)
        weights = np.ones(self.tokens.shape, np.float32)
        parts = np.arange(0, len(self.tokens), ROWS_AT_A_TIME)[1:]
        rows = zip(*(np.split(a, parts) for a in (self.tokens, weights)), strict=True)
        found = [likelihood(params, *of_rows).log for of_rows in rows]
        bits: np.ndarray = -np.concatenate(found).astype(np.float64) / np.log(2)
        return bits

    def per_byte(self, bits: np.ndarray) -> tuple[float, float]:
        """Return bits (or a difference of bits) per byte, and its standard error.

        bits: f64 [N]. The error is that of a ratio of sums over documents, which are
        drawn, by its linear part.
        """
        total, count = self.text_bytes.sum(), len(bits)
        ratio = bits.sum() / total
        rest = bits - ratio * self.text_bytes
        error = np.sqrt(count / (count - 1) * np.sum(rest**2)) / total
        return float(ratio), float(error)


def _beginning(
    tokenizer: Tokenizer, path: Path, length: int
) -> list[tuple[np.ndarray, int]]:
    """Return tokens and bytes of a document's beginning; nothing if it is too short."""
    text = path.read_text(encoding="utf-8", errors="replace")
    (tokens,) = tokenizer.encode([text])
    tokens = tokens[:length]
    said = tokenizer.decode(tokens.tolist())
    first = tokenizer.decode(tokens[:1].tolist())
    if len(tokens) < length or not text.startswith(said):
        return []
    return [(tokens, len(said.encode()) - len(first.encode()))]
