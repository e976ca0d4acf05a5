"""`metrics.jsonl`, in files of bounded size, and the same numbers as curves in sinks:
`tensorboard/`, Weights & Biases.

Points go to a sink by a thread that no caller waits for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.config import Config
from diloco_jax.errors import PASSING
from diloco_jax.observability.sinks import SINKS, Point, RunOf, Sink, require
from diloco_jax.observability.tape import SEGMENT_BYTES, JsonLines, read_lines

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
"""Seconds until a point is handed on; flushing waits for the disk or the network."""
CLOSE_S = 10.0
"""Seconds for the last points; a thread that still hangs then is left behind."""
RETRY_S = 60.0
"""Seconds between two sinks; otherwise a full disk would lead to endless new files."""
MOST_POINTS_WAITING = 100_000
"""Points that may wait for a slow sink; later ones are left out."""


class Curves:
    """The curves of a run for one sink. `add` never waits and never raises."""

    def __init__(self, name: str, begin: Callable[[int], Sink]) -> None:
        """name: of the sink, for people. begin: makes a sink; given the number of those
        it has made before."""
        self._name, self._begin = name, begin
        self._points: queue.Queue[Point | None] = queue.Queue(MOST_POINTS_WAITING)
        self._left_out = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="curves", daemon=True)
        self._thread.start()

    def add(self, point: Point) -> None:
        """Queue a point, or leave it out if too many wait."""
        try:
            self._points.put_nowait(point)
        except queue.Full:
            if not self._left_out:
                self._left_out = True
                logger.warning(
                    "%d points wait for %s; curves leave out what comes now, "
                    "metrics.jsonl has it",
                    MOST_POINTS_WAITING,
                    self._name,
                )

    def close(self) -> None:
        """Hand on the queued points, if the sink allows it."""
        self._closing.set()
        try:
            self._points.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        """Feed one sink, and another one after each error."""
        for attempt in itertools.count():
            last = self._closing.is_set()
            try:
                self._feed(attempt)
                return
            except Exception as error:
                # A sink is somebody else's code: whatever it raises ends no run.
                if not attempt:
                    logger.warning(
                        "curves in %s are not complete (%s: %s); metrics.jsonl has all",
                        self._name,
                        type(error).__name__,
                        error,
                    )
            if last or (self._closing.wait(RETRY_S) and self._points.empty()):
                return

    def _feed(self, attempt: int) -> None:
        """Hand points on to one sink until `close` is called."""
        if (point := self._points.get()) is None:
            return
        sink = self._begin(attempt)
        try:
            flush_at = time.monotonic() + FLUSH_S
            while point is not None:
                sink.write(point)
                try:
                    left_s = max(0.0, flush_at - time.monotonic())
                    point = self._points.get(timeout=left_s)
                except queue.Empty:
                    sink.flush()
                    point = self._points.get()
                    flush_at = time.monotonic() + FLUSH_S
        except Exception:
            # What failed first is told, not what its end does not find any more.
            with contextlib.suppress(Exception):
                sink.close()
            raise
        sink.close()


MOST_WAITING = 100_000
"""Lines that may wait for space on a full disk; beyond it, the oldest are left out."""
MEASURES = ("norm", "pairwise_cosine", "cosine_to_last", "length_ratio", "step_ratio")
"""Measures of a merge's deltas, which every line of a merge has."""
CURVES = {
    "island": (
        *("loss", "loss_by_source", "adoption_loss", "eval_loss", "learning_rate"),
        *("median_step_seconds", "stalled_seconds", "bytes_up", "bytes_down"),
    ),
    "merged_model": ("eval_loss",),
    "merge": ("tokens", "seconds", *MEASURES, "experts"),
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
        require(sinks)
        self._lines = JsonLines(workdir / run_files.METRICS, segment_bytes)
        self._curves = [
            Curves(name, functools.partial(SINKS[name], run)) for name in sinks
        ]
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
