"""`diloco simulate calibrate WORKDIR`: predict a run from a recorded run's times."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.fields import positional, setting
from diloco_jax.config.loading import read_config
from diloco_jax.options import NoOptions, parse_known, parse_with_config
from diloco_jax.simulation.calibration.fit import Calibration, calibrate
from diloco_jax.simulation.output import bar, or_dash, show, table
from diloco_jax.simulation.progress import Progress, nobody, part

RUN_FIELDS = ("goodput", "compute_goodput", "uptime", "wall_seconds", "merges")
ISLAND_FIELDS = ("median_step_seconds", "steps", "tokens_merged", "participation")
"""Fields of `summary.json` that are predicted."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """The options of `diloco simulate calibrate`."""

    workdir: Path = positional(metavar="WORKDIR", help="Workdir of the recorded run.")
    config: str = setting(
        "", help="Config of the run to predict; empty = that of the recorded run."
    )
    seeds: int = setting(3, help="Draws of the step times.")
    json: bool = setting(False, help="Print one JSON object to standard output.")


@dataclasses.dataclass(frozen=True)
class Row:
    """One number, predicted as the mean over seeds. measured: None if unknown."""

    what: str
    predicted: float
    low: float
    high: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """Error of the prediction, relative to the measurement."""
        return self.predicted / self.measured - 1 if self.measured else None


def calibrate_command(arguments: Sequence[str]) -> int:
    """Run `diloco simulate calibrate`.

    Raises ConfigError if a workdir or config cannot be used.
    """
    (options,), overrides = parse_known(
        [CalibrateOptions],
        arguments,
        "diloco simulate calibrate",
        "Fit the simulator to a recorded run, and predict another one: goodput, step "
        "times, participation, merges. Options such as --islands.NAME.step-seconds 2 "
        "or --faults NAME@40:kill change the config.",
    )
    if options.seeds < 1:
        raise ConfigError(f"--seeds {options.seeds}; choose at least 1")
    with bar("reading the tape") as progress:
        calibration = calibrate(options.workdir, progress)
    config, _ = parse_with_config(
        read_config(options.config or options.workdir / run_files.CONFIG),
        overrides,
        NoOptions(),
        f"diloco simulate calibrate {options.workdir}",
    )
    measured = calibration.summary if config == calibration.config else None
    with bar("calibrate") as progress:
        rows = predict(calibration, config, options.seeds, measured, progress)
    values = {
        "fitted": {w: dataclasses.asdict(one) for w, one in calibration.fitted()},
        "predicted": [{**dataclasses.asdict(r), "error": r.error} for r in rows],
    }
    fitted = table("fitted, seconds", "value", "from", "to", "observed")
    for what, one in calibration.fitted():
        seen = str(one.observed or "0: a guess")
        seconds = (one.value, one.low, one.high)
        fitted.add_row(what, *(f"{s:.4f}" for s in seconds), seen)
    predicted = table("predicted", "value", "from", "to", "measured", "error")
    for row in rows:
        numbers = [f"{n:.4g}" for n in (row.predicted, row.low, row.high)]
        compared = or_dash(row.measured, ".4g"), or_dash(row.error, "+.1%")
        predicted.add_row(row.what, *numbers, *compared)
    show(options.json, values, fitted, predicted)
    return 0


def predict(
    calibration: Calibration,
    config: Config,
    seeds: int,
    measured: Mapping[str, Any] | None,
    progress: Progress = nobody,
) -> list[Row]:
    """Predict a run of `config`, beside the summary of such a run.

    seeds: number of draws of the step times. Raises ConfigError if the run cannot be
    predicted, or only in hours.
    """
    # This module imports jax.
    from diloco_jax.simulation.calibration.prediction import predict_summary

    known = _numbers(measured) if measured else {}
    played = [
        _numbers(predict_summary(calibration, config, n, part(progress, n, seeds)))
        for n in range(seeds)
    ]
    return [
        Row(what, statistics.fmean(own), min(own), max(own), known.get(what))
        for what in played[0]
        for own in [[one[what] for one in played]]
    ]


def _numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a summary that are predicted, by name."""
    try:
        own = {field: float(summary[field]) for field in RUN_FIELDS}
        for name, island in summary["islands"].items():
            own |= {f"{name}: {field}": float(island[field]) for field in ISLAND_FIELDS}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"summary.json is not what a run leaves ({error!r}); restore it from a copy"
        ) from error
    return own
