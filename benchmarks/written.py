"""The cost of tape, metrics and logs, beside the steps of their run.

Question: how much of the steps' time does it take to write what can be replayed, seen
and read later? Two islands train with a merge about every second step, and the lines of
tape, metrics and logs are counted. Then the same lines are written once more, by the
code that wrote them, alone: that gives processor seconds per line, and with them per
step of an island.

The coordinator's thread writes tape and metrics (curves for TensorBoard included), each
process its own log. So an island's step bears only its log; the sum is what all of it
takes of a core.

Prediction: below a thousandth. A line is 20 to 60 us, and a step has one or two.

Command: `python -m benchmarks.written`. Cost: a minute and a half on two cores.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import support

from diloco_jax import run_files
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.models.presets import preset
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape

SHARE_MAX = 0.005
ISLANDS = ("a", "b")
CYCLE_STEPS = FRAGMENTS = 12
BATCH, SEQUENCE, STEP_SECONDS = 2, 64, 0.1
SECONDS, QUICK_SECONDS = 60, 15
TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Written:
    """One kind of lines. core_s: of writing them all once more."""

    lines: int
    core_s: float


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    options = support.quick_parser(__doc__).parse_args()
    seconds = QUICK_SECONDS if options.quick else SECONDS
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        run = support.run_in(config_of(seconds), Path(folder), TIMEOUT_S)
        found = written(run, Path(folder) / "again")
    islands = run.summary["islands"].values()
    steps = sum(island["steps"] for island in islands)
    spent = sum(i["steps"] * i["median_step_seconds"] for i in islands)
    rows = [
        {
            "what": name,
            "lines": str(kind.lines),
            "lines per step": f"{kind.lines / steps:.3f}",
            "us per line": f"{1e6 * kind.core_s / max(1, kind.lines):.1f}",
            "share of the steps": f"{kind.core_s / spent:.5f}",
        }
        for name, kind in found.items()
    ]
    share = sum(kind.core_s for kind in found.values()) / spent
    own = found["logs"].core_s / spent
    checks = [
        support.at_most("share of the steps' time", share, SHARE_MAX, ".5f"),
        support.at_most("of it on islands", own, SHARE_MAX, ".5f"),
        support.at_least("tape lines", found["tape"].lines, 100, ".0f"),
    ]
    return support.deliver(
        options,
        "written",
        __doc__,
        {f"{steps} steps of {STEP_SECONDS:g} s": rows},
        checks,
        {"written": {n: dataclasses.asdict(k) for n, k in found.items()}},
    )


def config_of(seconds: int) -> Config:
    """Return a run of that many seconds."""
    steps = int(seconds / STEP_SECONDS)
    run = RunConfig(
        model=preset("tiny"),
        data=DataConfig(validation_fraction=0.005),
        sync=SyncConfig(steps_per_cycle=CYCLE_STEPS, fragments=FRAGMENTS),
        sequence_length=SEQUENCE,
        total_tokens=steps * len(ISLANDS) * BATCH * SEQUENCE,
    )
    island = IslandConfig(batch_size=BATCH, step_seconds=STEP_SECONDS)
    islands = dict.fromkeys(ISLANDS, island)
    return Config(run=run, islands=islands, placement=Placement()).validate()


def written(run: support.Run, folder: Path) -> dict[str, Written]:
    """Write all that a run has written once more, into a folder."""
    tape, metrics = Tape(folder / run_files.TAPE), Metrics(folder)
    records = [{k: v for k, v in line.items() if k != "prev"} for line in run.tape]
    logs = [
        line
        for path in sorted((run.workdir / run_files.LOGS).iterdir())
        for line in path.read_text().splitlines()
    ]
    handler = logging.FileHandler(folder / "log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    own = logging.Logger("again")
    own.addHandler(handler)
    found = {
        "tape": _again(tape.append, records),
        "metrics": _again(metrics.append, run.metrics),
        "logs": _again(own.info, logs),
    }
    tape.close()
    metrics.close()
    handler.close()
    return found


def _again(write: Callable[[Any], None], lines: Sequence[Any]) -> Written:
    began = time.process_time()
    for line in lines:
        write(line)
    return Written(len(lines), time.process_time() - began)


if __name__ == "__main__":
    support.script(main)
