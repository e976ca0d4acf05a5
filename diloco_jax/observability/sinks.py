"""Where the curves of a run go: TensorBoard's files, Weights & Biases.

A sink is a class in `SINKS`. What it needs is imported when it is asked for.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from diloco_jax import run_files
from diloco_jax.errors import ConfigError, suggest

PROJECT = "diloco"
"""Project in Weights & Biases, unless WANDB_PROJECT names another."""


class Point(NamedTuple):
    """One value of one curve."""

    curve: str
    """`KIND/FIELD/NAME`, or `KIND/FIELD/NAME/PART`: "island/loss/a"."""
    value: float
    step: int
    time: float
    """Unix seconds."""
    axis: str
    """Name of that on which `step` counts: "island/step/a"."""


class RunOf(NamedTuple):
    """The run whose curves a sink gets."""

    workdir: Path
    run_id: str
    config: Mapping[str, Any]
    """As builtins."""


class Sink(Protocol):
    """Takes points. One thread calls it, which nobody waits for; it may block, and may
    raise any error: another one is then made, with what comes later."""

    needs: ClassVar[str]
    """Package without which it cannot begin."""

    def __init__(self, run: RunOf, attempt: int) -> None:
        """Begin. attempt: number of the sinks that this process made for the run."""

    def write(self, point: Point) -> None:
        """Take a point."""

    def flush(self) -> None:
        """Hand on what was taken."""

    def close(self) -> None:
        """Hand on what was taken, and end."""


class TensorBoard(Sink):
    """One event file, in the run's folder `tensorboard/`.

    tensorboardX's own `SummaryWriter` does not do: its thread ends at the first error
    of the disk, and the next caller that adds a point waits forever.
    """

    needs = "tensorboardX"

    def __init__(self, run: RunOf, attempt: int) -> None:
        """Make a file of its own: an older one may end in half a point, at which its
        readers stop."""
        from tensorboardX.event_file_writer import EventsWriter

        folder = run.workdir / run_files.CURVES
        folder.mkdir(parents=True, exist_ok=True)
        # The name only has seconds; an existing file would be overwritten.
        self._file = EventsWriter(str(folder / "events"), f".{attempt}")

    def write(self, point: Point) -> None:
        """Take a point."""
        from tensorboardX import summary
        from tensorboardX.proto.event_pb2 import Event

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


class WeightsAndBiases(Sink):
    """One run of wandb, under the run's id, so that a coordinator that comes back goes
    on with it.

    Each island, fragment and merged model has an axis of its own: their steps, versions
    and cycles, which know nothing of each other. Where to, and with which key, is said
    to wandb itself: `wandb login` or WANDB_API_KEY, WANDB_PROJECT, WANDB_ENTITY,
    WANDB_MODE=offline.
    """

    needs = "wandb"

    def __init__(self, run: RunOf, attempt: int) -> None:
        """Begin the run there, or go on with it."""
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.run_id,
            name=run.workdir.name,
            dir=str(run.workdir),
            config=dict(run.config),
            resume="allow",
        )
        self._known: set[str] = set()
        self._row: dict[str, float] = {}
        """Values of one line that were not handed on yet."""
        self._at: tuple[str, int] | None = None
        """Axis of that line, and the place on it."""

    def write(self, point: Point) -> None:
        """Take a point; those of one line go as one row."""
        axis = point.axis
        if self._at != (axis, point.step):
            self.flush()
            self._at, self._row = (axis, point.step), {axis: point.step}
        if point.curve not in self._known:
            self._known.add(point.curve)
            self._run.define_metric(point.curve, step_metric=axis)
        self._row[point.curve] = point.value

    def flush(self) -> None:
        """Hand the last line on; wandb sends it by itself."""
        if self._row:
            self._run.log(self._row)
        self._at, self._row = None, {}

    def close(self) -> None:
        """Hand on what was taken, and end the run's life here."""
        self.flush()
        self._run.finish()


SINKS: Mapping[str, type[Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}
"""Each sink by its name in `placement.sinks`."""


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError if one is no sink's."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(
                f"placement.sinks has {name!r}, and there is no such sink"
                f"{suggest(name, SINKS)}; there are {', '.join(SINKS)}"
            )


def require(names: Iterable[str]) -> None:
    """Raise ConfigError as `check_names`, and if what one needs is not installed."""
    check_names(names)
    for name in names:
        try:
            importlib.import_module(SINKS[name].needs)
        except ImportError as error:
            raise ConfigError(
                f"placement.sinks has {name!r}, and {error.name} is not installed "
                f"here: pip install 'diloco-jax[{name}]', or leave it out"
            ) from error
