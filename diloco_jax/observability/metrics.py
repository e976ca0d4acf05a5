"""`metrics.jsonl`, and the same numbers as curves in `tensorboard/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.observability.curves import Curves, Point
from diloco_jax.observability.tape import JsonLines

CURVES = {
    "island": (
        *("loss", "eval_loss", "learning_rate"),
        *("median_step_seconds", "stalled_seconds", "bytes_up", "bytes_down"),
    ),
    "merge": (
        *("norm", "tokens", "seconds"),
        *("pairwise_cosine", "cosine_to_last", "length_ratio", "step_ratio"),
    ),
}
"""Fields drawn as curves, by kind of line."""


class Metrics:
    """Lines of numbers with a kind and a time. Use from one thread at a time."""

    def __init__(self, workdir: Path) -> None:
        self._lines = JsonLines(workdir / run_files.METRICS)
        self._curves = Curves(workdir / run_files.CURVES)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line, and a point of each of its curves: an island's curves over its
        own steps, a fragment's merges over versions."""
        self._lines.append(record)
        kind = record["kind"]
        if kind == "island":
            name, step = record["island"], record["step"]
        else:
            name, step = f"fragment-{record['fragment']}", record["version"]
        for field in CURVES[kind]:
            value = record[field]
            if value is not None:
                curve = f"{kind}/{field}/{name}"
                self._curves.add(Point(curve, value, step, record["time"]))

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        self._curves.close()
