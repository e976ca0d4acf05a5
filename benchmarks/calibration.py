"""The simulator, calibrated on one run, predicts another one.

Question: run A trains three islands with emulated step times; an island and the
coordinator are killed once. `diloco simulate calibrate` fits step times, transfers,
joins and outages to what A left. Does the simulator, with nothing else
known, predict run B of the same islands with other step times, in which two islands are
killed four times each, and the coordinator, so that B's goodput is another than A's?

A and B are real: `diloco run`, processes on this machine. The emulated steps are many
times their compute, so that the machine's other work does not count for them; for how
long a process takes to start, which is predicted too, it does: give the benchmark
priority there (`nice -n -10`). A short run before A leaves the compiled programs in
the cache, where A and B find them.

Prediction: goodput and step times within 5 %; participation and merges close to that,
since they follow from the order of events, which a few milliseconds can turn around.

Command: `python benchmarks/calibration.py`. Cost: about 8 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import support

from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.models.presets import preset
from diloco_jax.simulation.calibration.command import Row, predict
from diloco_jax.simulation.calibration.fit import Calibration, calibrate

ERROR_MAX = 0.05
"""Relative error of goodput and step times."""
FLOOR_OVER_COMPUTE_MIN = 4.0
"""Emulated step time over CPU seconds of a step."""
BATCHES = {"a": 2, "b": 2, "c": 4}
STEP_SECONDS = {
    "A": {"a": 0.5, "b": 0.6, "c": 1.0},
    "B": {"a": 0.9, "b": 0.5, "c": 0.7},
}
KILLED: dict[str, dict[str, tuple[float, ...]]] = {
    "A": {"b": (1 / 4,)},
    "B": {"a": (1 / 8, 1 / 7, 1 / 8, 1 / 7), "c": (1 / 6, 1 / 8, 1 / 6, 1 / 8)},
}
"""Islands, and for what shares of the run each of their incarnations steps."""
COORDINATOR_KILLED = {"A": 1 / 2, "B": 1 / 4}
"""Share of the run after which it happens."""
GOODPUT_APART_MIN = 0.05
"""Difference between A and B, without which A's goodput alone would predict B's."""
CYCLE_STEPS, FRAGMENTS, SEQUENCE = 12, 6, 64
SEEDS = 5
WARM_SECONDS = 10.0
TIMEOUT_S = 900.0


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=170.0, help="of every run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        support.run_config(
            without_faults(run_config("A", WARM_SECONDS)), "compiling", TIMEOUT_S
        )
        runs = {}
        for kind in STEP_SECONDS:
            place = Path(folder) / kind
            place.mkdir()
            config = run_config(kind, options.seconds)
            runs[kind] = support.run_in(config, place, TIMEOUT_S)
        calibration = calibrate(Path(folder) / "A" / "run")
    rows = {
        kind: predict(calibration, run.config, SEEDS, run.summary)
        for kind, run in runs.items()
    }
    return support.write_results(
        options.out,
        "calibration",
        __doc__,
        {
            "Run B, predicted from A": [format_row(row) for row in rows["B"]],
            "Run A, repeated by the simulator": [format_row(row) for row in rows["A"]],
            "Fitted to A, in seconds": format_fitted(calibration),
            "Runs": [format_run(kind) for kind in STEP_SECONDS],
        },
        bounds(runs, rows["B"]),
        {
            "fitted": {
                what: dataclasses.asdict(one) for what, one in calibration.fitted()
            },
            "predicted": {
                kind: [{**dataclasses.asdict(row), "error": row.error} for row in found]
                for kind, found in rows.items()
            },
        },
    )


def run_config(kind: str, seconds: float) -> Config:
    """Return run A or B, with as many tokens as its islands compute in `seconds`."""
    steps = STEP_SECONDS[kind]
    rate = sum(BATCHES[name] / step_s for name, step_s in steps.items())
    # The pacing island is the second fastest; there is a merge per tick.
    pacing_s = sorted(steps.values())[1]
    merges = seconds / pacing_s / CYCLE_STEPS * FRAGMENTS
    run = RunConfig(
        model=preset("tiny"),
        data=DataConfig(validation_fraction=0.005),
        sync=SyncConfig(steps_per_cycle=CYCLE_STEPS, fragments=FRAGMENTS, quorum=2),
        sequence_length=SEQUENCE,
        total_tokens=round(seconds * rate) * SEQUENCE,
    )
    islands = {
        name: IslandConfig(batch_size=BATCHES[name], step_seconds=step_s)
        for name, step_s in steps.items()
    }
    faults = [
        f"{name}#{incarnation}@{round(share * seconds / steps[name])}:kill"
        for name, shares in KILLED[kind].items()
        for incarnation, share in enumerate(shares, 1)
    ]
    faults.append(f"coordinator@{round(COORDINATOR_KILLED[kind] * merges)}:kill")
    return Config(
        run=run, islands=islands, placement=Placement(faults=tuple(faults))
    ).validate()


def without_faults(config: Config) -> Config:
    """Return the same run without kills."""
    return dataclasses.replace(config, placement=Placement())


def bounds(runs: Mapping[str, support.Run], rows: Sequence[Row]) -> list[support.Check]:
    """The bounds of this benchmark."""
    checks = [
        support.at_most(f"B: error of {row.what}", abs(row.error), ERROR_MAX, ".4f")
        for row in rows
        if row.error is not None
        and (row.what == "goodput" or row.what.endswith("median_step_seconds"))
    ]
    for kind, run in runs.items():
        share = statistics.fmean(run.cpu_share(name) for name in BATCHES)
        checks.append(
            support.at_least(
                f"{kind}: emulated step over its CPU seconds",
                1 / share,
                FLOOR_OVER_COMPUTE_MIN,
                ".1f",
            )
        )
        joins = sum(island["joins"] for island in run.summary["islands"].values())
        recovered = sum(line["kind"] == "recovered" for line in run.tape)
        kills = sum(map(len, KILLED[kind].values()))
        wanted = (len(BATCHES) + kills, 1)
        missing = [] if (joins, recovered) == wanted else [f"{joins}, {recovered}"]
        checks.append(support.none_of(f"{kind}: kills that did not strike", missing))
    apart = runs["A"].summary["goodput"] - runs["B"].summary["goodput"]
    checks.append(
        support.at_least("goodput of A over that of B", apart, GOODPUT_APART_MIN)
    )
    return checks


def format_row(row: Row) -> dict[str, Any]:
    """For the table."""
    return {
        "what": row.what,
        "predicted": f"{row.predicted:.5g}",
        "measured": "-" if row.measured is None else f"{row.measured:.5g}",
        "error": "-" if row.error is None else f"{row.error:+.2%}",
    }


def format_fitted(calibration: Calibration) -> list[dict[str, Any]]:
    """For the table."""
    return [
        {
            "what": what,
            "fitted": f"{one.value:.4f}",
            "from": f"{one.low:.4f}",
            "to": f"{one.high:.4f}",
            "observed": one.observed,
        }
        for what, one in calibration.fitted()
    ]


def format_run(kind: str) -> dict[str, Any]:
    """For the table."""
    killed = [
        f"{name} after {' and another '.join(f'{share:.0%}' for share in shares)}"
        for name, shares in KILLED[kind].items()
    ]
    return {
        "run": kind,
        **{f"{name}, s": step_s for name, step_s in STEP_SECONDS[kind].items()},
        "killed": f"{', '.join(killed)}, coordinator after "
        f"{COORDINATOR_KILLED[kind]:.0%}",
    }


if __name__ == "__main__":
    support.script(main)
