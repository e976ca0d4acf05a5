"""Points of curves for TensorBoard, written by a thread that no caller waits for."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from pathlib import Path
from typing import NamedTuple

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
"""Seconds until a point is in the file; flushing waits for the disk."""
CLOSE_S = 10.0
"""Seconds for the last points; a thread that still hangs then is left behind."""
RETRY_S = 60.0
"""Seconds between two files; otherwise a full disk would lead to endless new files."""
MOST_WAITING = 100_000
"""Points that may wait for a slow disk; later ones are left out."""


class Point(NamedTuple):
    """One value of one curve."""

    curve: str
    value: float
    step: int
    time: float


class Curves:
    """Event files in one folder. `add` never waits and never raises.

    tensorboardX's own `SummaryWriter` does not do: its thread ends at the first error
    of the disk, and the next caller that adds a point waits forever.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._points: queue.Queue[Point | None] = queue.Queue(MOST_WAITING)
        self._files = itertools.count()
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
                    "%s: %d points wait for the disk; curves leave out what comes now, "
                    "metrics.jsonl has it",
                    self._folder,
                    MOST_WAITING,
                )

    def close(self) -> None:
        """Write the queued points, if the disk allows it."""
        self._closing.set()
        try:
            self._points.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    # ---- the thread -------------------------------------------------------------

    def _run(self) -> None:
        """Write files, a new one after each error: the old one may end in half a point,
        at which its readers stop."""
        told = False
        while True:
            last = self._closing.is_set()
            try:
                self._write_file()
                return
            except OSError as error:
                if not told:
                    told = True
                    logger.warning(
                        "curves in %s are not complete (%s); metrics.jsonl has all",
                        self._folder,
                        error,
                    )
            if last or (self._closing.wait(RETRY_S) and self._points.empty()):
                return

    def _write_file(self) -> None:
        """Write one file until `close` is called."""
        point = self._points.get()
        if point is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        # The name only has seconds; an existing file would be overwritten.
        suffix = f".{next(self._files)}"
        file = EventsWriter(str(self._folder / "events"), suffix)
        try:
            self._write_points(file, point)
        except OSError:
            with contextlib.suppress(OSError):
                file.close()
            raise
        file.close()

    def _write_points(self, file: EventsWriter, first: Point) -> None:
        """Write points until `close` is called."""
        point: Point | None = first
        flush_at = time.monotonic() + FLUSH_S
        while point is not None:
            file.write_event(
                Event(
                    step=point.step,
                    wall_time=point.time,
                    summary=summary.scalar(point.curve, point.value),
                )
            )
            try:
                point = self._points.get(timeout=max(0.0, flush_at - time.monotonic()))
            except queue.Empty:
                file.flush()
                point = self._points.get()
                flush_at = time.monotonic() + FLUSH_S
