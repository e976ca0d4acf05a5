"""`metrics.jsonl`, in files of bounded size, and the same numbers as curves in sinks:
`tensorboard/`, Weights & Biases."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.config import Config
from diloco_jax.errors import PASSING
from diloco_jax.observability.curves import Curves
from diloco_jax.observability.segments import SEGMENT_BYTES
from diloco_jax.observability.sinks import Point, RunOf, find
from diloco_jax.observability.tape import JsonLines, read_lines

logger = logging.getLogger(__name__)

MOST_WAITING = 100_000
"""Lines that may wait for space on a full disk; beyond it, the oldest are left out."""
CURVES = {
    "island": (
        *("loss", "loss_by_source", "eval_loss", "learning_rate"),
        *("median_step_seconds", "stalled_seconds", "bytes_up", "bytes_down"),
    ),
    "merged_model": ("eval_loss",),
    "merge": (
        *("norm", "tokens", "seconds"),
        *("pairwise_cosine", "cosine_to_last", "length_ratio", "step_ratio"),
    ),
}
"""Fields drawn as curves, by kind of line."""


class Metrics:
    """Lines of numbers with a kind and a time. Use from one thread at a time.

    While the disk is full, lines wait in memory, and nobody waits for them."""

    def __init__(
        self,
        workdir: Path,
        segment_bytes: int = SEGMENT_BYTES,
        *,
        sinks: Sequence[str] = ("tensorboard",),
        run_id: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise ConfigError if there is no such sink. run_id, config: the run's, for
        sinks that show them."""
        run = RunOf(workdir, run_id, config or {})
        makers = {name: functools.partial(find(name), run) for name in sinks}
        self._lines = JsonLines(workdir / run_files.METRICS, segment_bytes)
        self._curves = [Curves(name, make) for name, make in makers.items()]
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._left_out = 0
        self.last_merge: Mapping[str, Any] | None = None
        """The last line of a merge that this process wrote."""

    @classmethod
    def of_run(cls, config: Config, workdir: Path, run_id: str) -> Metrics:
        """Make those of a run, with the sinks that its config names."""
        return cls(
            workdir,
            sinks=config.placement.sinks,
            run_id=run_id,
            config=dataclasses.asdict(config),
        )

    @property
    def alerts(self) -> list[str]:
        """Count the lines that wait for the disk or were left out, for people."""
        texts = []
        if self._waiting:
            texts.append(
                f"{len(self._waiting)} lines wait for space on the disk of "
                f"{self._lines.path}; free some there"
            )
        if self._left_out:
            texts.append(
                f"{self._lines.path} lacks {self._left_out} lines: the disk was full "
                f"for too long"
            )
        return texts

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a line, and a point of each of its curves: an island's curves over its
        own steps, a fragment's merges over versions, the merged model over cycles."""
        self._waiting.append(record)
        self._write()
        kind = record["kind"]
        match kind:
            case "island":
                name, step = record["island"], record["step"]
            case "merged_model":
                name, step = "by-cycle", record["cycle"]
            case "merge":
                self.last_merge = record
                name, step = f"fragment-{record['fragment']}", record["version"]
            case _:  # Bytes of the machine have no steps.
                return
        for field in CURVES[kind]:
            value, curve = record[field], f"{kind}/{field}/{name}"
            of_parts = value if isinstance(value, dict) else {"": value}
            for part, number in of_parts.items():
                if number is None:
                    continue
                at = f"{curve}/{part}" if part else curve
                axis = f"{kind}/step/{name}"
                point = Point(at, number, step, record["time"], axis)
                for curves in self._curves:
                    curves.add(point)

    def close(self) -> None:
        """Close the files."""
        self._write()
        if lost := self._left_out + len(self._waiting):
            logger.error(
                "%s lacks %d lines: its disk is full or was", self._lines.path, lost
            )
        self._lines.close()
        for curves in self._curves:
            curves.close()

    def _write(self) -> None:
        """Write the lines that wait, as far as there is space."""
        try:
            while self._waiting:
                self._lines.append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            if len(self._waiting) == 1:
                logger.warning("%s cannot be written, its lines wait", self._lines.path)
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()
            self._left_out += 1


def read_metrics(workdir: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run in the order in which they were written, from all files;
    one that is being written is left out. FileNotFoundError if there are none."""
    return read_lines(Path(workdir) / run_files.METRICS)
