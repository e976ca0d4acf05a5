"""Event files for TensorBoard, in the run's folder `tensorboard/`."""

from __future__ import annotations

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event

from diloco_jax import run_files
from diloco_jax.observability.sinks import Point, RunOf


class TensorBoard:
    """One event file.

    tensorboardX's own `SummaryWriter` does not do: its thread ends at the first error
    of the disk, and the next caller that adds a point waits forever.
    """

    def __init__(self, run: RunOf, attempt: int) -> None:
        """Make a file of its own: an older one may end in half a point, at which its
        readers stop."""
        folder = run.workdir / run_files.CURVES
        folder.mkdir(parents=True, exist_ok=True)
        # The name only has seconds; an existing file would be overwritten.
        self._file = EventsWriter(str(folder / "events"), f".{attempt}")

    def write(self, point: Point) -> None:
        """Take a point."""
        self._file.write_event(
            Event(
                step=point.step,
                wall_time=point.time,
                summary=summary.scalar(point.curve, point.value),
            )
        )

    def flush(self) -> None:
        """Write to the disk, and wait for it."""
        self._file.flush()

    def close(self) -> None:
        """Close the file, also where the disk does not take its last points."""
        try:
            self._file.close()
        except OSError:
            # `EventsWriter` flushes first, and leaves the file open if that fails.
            self._file._py_recordio_writer.close()
            raise
