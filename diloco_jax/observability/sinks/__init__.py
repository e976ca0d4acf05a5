"""Where the curves of a run go: TensorBoard's files, Weights & Biases.

A sink is one file with a class, and a line in `SINKS`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from diloco_jax.errors import ConfigError, suggest

SINKS: Mapping[str, str] = {
    "tensorboard": "diloco_jax.observability.sinks.tensorboard:TensorBoard",
    "wandb": "diloco_jax.observability.sinks.wandb:WeightsAndBiases",
}
"""Location of each sink's class, by the name in `placement.sinks`."""


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

    def __init__(self, run: RunOf, attempt: int) -> None:
        """Begin. attempt: number of the sinks that this process made for the run."""

    def write(self, point: Point) -> None:
        """Take a point."""

    def flush(self) -> None:
        """Hand on what was taken."""

    def close(self) -> None:
        """Hand on what was taken, and end."""


def check_names(names: Iterable[str]) -> None:
    """Raise ConfigError if one is no sink's."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(
                f"placement.sinks has {name!r}, and there is no such sink"
                f"{suggest(name, SINKS)}; there are {', '.join(SINKS)}"
            )


def require(names: Iterable[str]) -> None:
    """Raise ConfigError if what one of the sinks needs is not installed here."""
    for name in names:
        find(name)


def find(name: str) -> type[Sink]:
    """Return the class of a sink. Raises ConfigError as `check_names` and `require`."""
    check_names([name])
    try:
        sink: type[Sink] = pkgutil.resolve_name(SINKS[name])
    except ImportError as error:
        raise ConfigError(
            f"placement.sinks has {name!r}, and {error.name} is not installed here: "
            f"pip install 'diloco-jax[{name}]', or leave it out"
        ) from error
    return sink
