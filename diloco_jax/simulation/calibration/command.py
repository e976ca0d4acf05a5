"""`diloco simulate calibrate WORKDIR`: what a recorded run's times predict."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.fields import positional, setting
from diloco_jax.config.loading import read_config
from diloco_jax.options import NoOptions, parse_known, parse_with_config
from diloco_jax.simulation.calibration.fit import Calibration, Fitted, calibrate
from diloco_jax.simulation.calibration.notes import notes_on
from diloco_jax.simulation.calibration.observed import (
    ISLAND_FIELDS,
    RUN_FIELDS,
    Timeline,
    read_timeline,
)
from diloco_jax.simulation.progress import Progress, nobody, part

Bar = Callable[[str], AbstractContextManager[Progress]]
"""Shows how far something of that name is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """The options of `diloco simulate calibrate`."""

    workdir: Path = positional(metavar="WORKDIR", help="Workdir of the recorded run.")
    config: str = setting(
        "", help="Config of the run to predict; empty = that of the recorded run."
    )
    against: Path | None = setting(
        None,
        help="Workdir of the run to predict, which has ended: shows measurements and "
        "errors.",
    )
    seeds: int = setting(3, help="Orders of the recorded step times.")
    json: bool = setting(False, help="Print one JSON object to standard output.")


class Row(NamedTuple):
    """One number, predicted as the mean over seeds. measured: None if unknown."""

    what: str
    predicted: float
    low: float
    high: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """Of the prediction, relative to what was measured."""
        if not self.measured:
            return None
        return self.predicted / self.measured - 1


def calibrate_command(arguments: Sequence[str], bar: Bar) -> int:
    """Raises ConfigError if a workdir or config cannot be used."""
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
    timeline = read_timeline(options.workdir)
    against = read_timeline(options.against) if options.against else None
    config = _config(timeline, against, options.config, overrides)
    if against is None and config == timeline.config:
        against = timeline
    calibration = calibrate(timeline)
    measured = against.summary if against is not None else None
    with bar("calibrate") as progress:
        rows = predict(calibration, config, options.seeds, measured, progress)
    notes = list(notes_on(timeline, calibration, config, against))
    if options.json:
        print(json.dumps(_as_json(calibration, rows, notes)))
    else:
        console = Console(stderr=True, markup=False)
        for table in (_fitted_table(calibration), _prediction_table(rows)):
            console.print(table, highlight=False, soft_wrap=True)
        for note in notes:
            console.print(f"note: {note}", highlight=False, soft_wrap=True)
    return 0


def predict(
    calibration: Calibration,
    config: Config,
    seeds: int,
    measured: Mapping[str, Any] | None,
    progress: Progress = nobody,
) -> list[Row]:
    """What `config` comes to, over as many orders of the recorded step times, beside
    the summary of a run of it. Raises ConfigError if it cannot be told, or not soon."""
    # jax is imported by it.
    from diloco_jax.simulation.calibration.prediction import (
        Prediction,
        require_in_reach,
    )

    require_in_reach(calibration, config, seeds)
    played = []
    for seed in range(seeds):
        one = Prediction(calibration, config, seed)
        played.append(dict(_numbers(one.summary(part(progress, seed, seeds)))))
    known = dict(_numbers(measured)) if measured else {}
    return [
        Row(
            what,
            statistics.fmean(one[what] for one in played),
            min(one[what] for one in played),
            max(one[what] for one in played),
            known.get(what),
        )
        for what in played[0]
    ]


def fitted(calibration: Calibration) -> Iterator[tuple[str, Fitted]]:
    """Everything that was fitted, by name."""
    for name, steps in calibration.steps.items():
        yield f"{name}: step", steps.fitted
    for what, by_island in (
        ("control message", calibration.latency_s),
        ("delta's way up", calibration.up_s),
        ("publish's way down", calibration.down_s),
        ("start", calibration.start_s),
        ("first join", calibration.join_s),
        ("of it, compiling", calibration.compile_s),
        ("later join", calibration.rejoin_s),
    ):
        for name in calibration.steps:
            yield f"{name}: {what}", by_island[name]
    yield "start after an end", calibration.restart_s
    yield "merge", calibration.merge_s
    yield "coordinator's start, compiling included", calibration.compiled_s
    yield "its compiling after a return", calibration.recompiled_s
    yield "coordinator's outage", calibration.outage_s
    yield "return to it", calibration.resume_s


def _numbers(summary: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for field in RUN_FIELDS:
        yield field, summary[field]
    for name, island in summary["islands"].items():
        for field in ISLAND_FIELDS:
            yield f"{name}: {field}", island[field]


def _config(
    timeline: Timeline,
    against: Timeline | None,
    path: str,
    overrides: Sequence[str],
) -> Config:
    """Of the run to predict: what --config says, or that of --against, or the run's
    own; changed by the overrides."""
    if against is not None:
        if path or overrides:
            raise ConfigError(
                f"--against {against.workdir} brings its own config; leave out "
                f"{' '.join(['--config', path] if path else overrides)}"
            )
        return against.config
    config = read_config(path or timeline.workdir / run_files.CONFIG)
    prog = f"diloco simulate calibrate {timeline.workdir}"
    return parse_with_config(config, overrides, NoOptions(), prog)[0]


def _as_json(
    calibration: Calibration, rows: Sequence[Row], notes: Sequence[str]
) -> dict[str, Any]:
    return {
        "fitted": {what: one._asdict() for what, one in fitted(calibration)},
        "held_up_steps": {n: s.held_up for n, s in calibration.steps.items()},
        "predicted": [{**row._asdict(), "error": row.error} for row in rows],
        "notes": notes,
    }


def _fitted_table(calibration: Calibration) -> Table:
    table = _table("fitted, seconds", "value", "from", "to", "observed")
    for what, one in fitted(calibration):
        table.add_row(what, *(f"{value:.4f}" for value in one[:3]), str(one.observed))
    return table


def _prediction_table(rows: Sequence[Row]) -> Table:
    table = _table("predicted", "value", "from", "to", "measured", "error")
    for row in rows:
        error = row.error
        table.add_row(
            row.what,
            *(f"{value:.4g}" for value in row[1:4]),
            "-" if row.measured is None else f"{row.measured:.4g}",
            "-" if error is None else f"{error:+.1%}",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table
