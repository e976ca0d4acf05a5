"""Rates of this machine as a coordinator, measured by the product's own code.

`python -m diloco_jax.planning.measuring CONFIG_JSON FOLDER` prints the lines of
`workers`, with a coordinator's environment. The disk is that of FOLDER. Figures of
cores are process CPU seconds, so what else the machine does hardly counts; those of the
disk are seconds.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from diloco_jax import files, merge_route, storage
from diloco_jax.cluster.commands import coordinator_environment
from diloco_jax.config import Config, ConfigError, RunConfig
from diloco_jax.config.loading import read_config, write_config_json
from diloco_jax.config.resolving import resolve_outer
from diloco_jax.core.codecs import CODECS
from diloco_jax.core.kernels.passes import Passes
from diloco_jax.core.merge import RULES
from diloco_jax.hardware.rates import DiskRates, MachineRates
from diloco_jax.hardware.rule_rates import RULES_OF_PACKAGE, RuleRates
from diloco_jax.machine import cores
from diloco_jax.planning import wire_rate
from diloco_jax.planning.merge_rate import ELEMENTS, SIDE, time_merges
from diloco_jax.planning.workers import Progress, Workers, last_lines, tell

WORKER = "diloco_jax.planning.measuring"
DEADLINE_S = 600.0
"""Seconds for all of it; it takes less than one minute on two cores."""
FEW, MANY = 2, 8
"""Deltas of the two merges through which the line is drawn."""
MOST = 64
"""Deltas of the third merge by a rule that is no weighted sum, whose cost need not lie
on a line."""
WEIGHTED_SUM = "mean"
"""Rule to which one that is no weighted sum is compared."""
RULE_ROWS = SIDE // 4
"""Rows of the merges by such a rule: many deltas of a fourth of the size."""
LEAST_BEYOND = 0.01
"""Core seconds per 1e9 parameters that a rule takes beyond a weighted sum at least."""
REPETITIONS = 5
WIRE_BYTES, WIRE_REPETITIONS = 64 << 20, 5
DISK_BYTES, DISK_FILES = 128 << 20, 4
DISK_S = 8.0
"""Seconds after which a slow disk is given no further file."""
Report = Callable[[str, int, int], None]
"""Callback (current work, parts done, parts in all)."""


def measure(config: Config, folder: str, progress: Progress) -> MachineRates:
    """Measure in a process of its own. folder: one on the disk of the workdir.

    Raises ConfigError, also if the measurement fails.
    """
    files.require_writable(Path(folder), "the disk is measured in")
    with tempfile.TemporaryDirectory(prefix="diloco-measure-") as scratch:
        path, log = Path(scratch) / "config.json", Path(scratch) / "log"
        write_config_json(config, path)
        result, code = Workers().run(
            WORKER,
            [str(path), folder],
            environment=os.environ | coordinator_environment(),
            log=log,
            deadline_s=DEADLINE_S,
            progress=progress,
        )
        if result is None:
            raise ConfigError(
                f"measuring this machine ended with code {code} and no result; plan "
                f"without --measure for the constants; it said:\n{last_lines(log)}"
            )
    return msgspec.convert(result, MachineRates)


def measure_here(
    run: RunConfig, folder: Path, report: Report, passes: Passes | None
) -> MachineRates:
    """Measure in this process. run: with a resolved outer optimizer; passes: the merge
    route."""
    codecs = list(CODECS.table)
    parts = len(codecs) + 3
    by_sum = RULES.find(run.sync.merge).needs == "sum"
    summed = run if by_sum else _with_rule(run, WEIGHTED_SUM)
    merging, per_delta, replaying, copies = {}, {}, {}, []
    for done, codec in enumerate(codecs):
        report(f"merges, {codec}", done, parts)
        few, many = (
            time_merges(summed, codec, deltas, REPETITIONS, passes)
            for deltas in (FEW, MANY)
        )
        copies += [few.copy, many.copy]
        slope = max(0.0, (many.merge - few.merge) / (MANY - FEW))
        each = 1e9 / ELEMENTS
        merging[codec] = (few.merge - FEW * slope) * each
        per_delta[codec] = (slope + min(few.check, many.check)) * each
        replaying[codec] = min(few.replay, many.replay) * each
    whence = f"measured: `diloco plan --measure`, {_machine()}"
    route = merge_route.route_of(passes)
    rules = dict(RULES_OF_PACKAGE[route])
    report(f"the rule {run.sync.merge}", len(codecs), parts)
    if not by_sum:
        rules[run.sync.merge] = RuleRates(
            beyond_core_seconds=tuple(
                (deltas, _beyond(run, deltas, passes)) for deltas in (FEW, MANY, MOST)
            ),
            rule_from=whence,
        )
    report("wire", len(codecs) + 1, parts)
    up, down = wire_rate.core_seconds(WIRE_BYTES, WIRE_REPETITIONS)
    report("disk", len(codecs) + 2, parts)
    disk, write = disk_rates(folder)
    return MachineRates(
        merge_core_seconds=merging,
        delta_core_seconds=per_delta,
        rules=rules,
        replay_core_seconds=replaying,
        merge_route=route,
        upload_core_seconds=up,
        fetch_core_seconds=down,
        write_core_seconds=write,
        copy_bytes_per_s=4 * ELEMENTS / min(copies),
        disk=disk,
        merge=summed.sync.merge,
        outer=str(run.outer.optimizer),
        merges_from=whence,
        wire_from=whence,
        disk_from=f"{whence}, in {folder}",
    )


def _beyond(run: RunConfig, deltas: int, passes: Passes | None) -> float:
    """Return what the config's rule takes beyond a weighted sum, core seconds per 1e9
    parameters."""
    rule, summed = (
        time_merges(tried, run.sync.codec_up, deltas, REPETITIONS, passes, RULE_ROWS)
        for tried in (run, _with_rule(run, WEIGHTED_SUM))
    )
    beyond = (rule.merge - summed.merge) * 1e9 / (RULE_ROWS * SIDE)
    return max(beyond, LEAST_BEYOND)


def _with_rule(run: RunConfig, rule: str) -> RunConfig:
    return dataclasses.replace(run, sync=dataclasses.replace(run.sync, merge=rule))


def disk_rates(folder: Path) -> tuple[DiskRates, float]:
    """Write sealed files, as snapshots and publishes are, and read them again; return
    the rates and the core seconds per GB written.

    Files are on disk when they count as written. Before they are read, the system is
    asked to forget them. It does, unless they lie in memory (tmpfs).
    """
    block = np.random.default_rng(0).integers(0, 255, DISK_BYTES, np.uint8)
    into = np.empty_like(block)
    with tempfile.TemporaryDirectory(dir=folder, prefix="diloco-measure-") as scratch:
        count = _files_that_fit(Path(scratch))
        paths = [Path(scratch) / f"{number}" for number in range(count)]
        began, used = time.perf_counter(), time.process_time()
        for number, path in enumerate(paths):
            storage.write_sealed(path, {}, [block])
            if time.perf_counter() - began > DISK_S:
                paths = paths[: number + 1]
                break
        wrote, used = time.perf_counter() - began, time.process_time() - used
        for path in paths:
            _forget(path)
        began = time.perf_counter()
        for path in paths:
            storage.read_sealed(path, [into])
        took = time.perf_counter() - began
    size = len(paths) * DISK_BYTES
    rates = DiskRates(write_bytes_per_s=size / wrote, read_bytes_per_s=size / took)
    return rates, used / size * 1e9


def _files_that_fit(folder: Path) -> int:
    free = shutil.disk_usage(folder).free
    if free < 2 * DISK_BYTES:
        raise ConfigError(
            f"{folder.parent} has {free / 1e6:.0f} MB free, and measuring its disk "
            f"takes {2 * DISK_BYTES / 1e6:.0f}; free some, or give --workdir on another"
        )
    return min(DISK_FILES, free // DISK_BYTES - 1)


def _forget(path: Path) -> None:
    if not hasattr(os, "posix_fadvise"):  # macOS
        return
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _machine() -> str:
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.exists() else []
    models = [
        line.partition(": ")[2] for line in lines if line.startswith("model name")
    ]
    processor = models[0] if models else platform.machine()
    now = datetime.datetime.now(datetime.UTC)
    return f"{cores()} cores, {processor}, {now:%Y-%m-%d %H:%M} UTC"


def main(arguments: list[str]) -> None:
    """Print the lines that the module's docstring describes."""
    path, folder = arguments

    def report(doing: str, done: int, parts: int) -> None:
        tell({"doing": doing, "done": done, "parts": parts})

    try:
        config = resolve_outer(read_config(path))
        passes = merge_route.passes_of(config.placement.merge_route)
        rates: Any = msgspec.to_builtins(
            measure_here(config.run, Path(folder), report, passes)
        )
        tell({"result": rates})
    except ConfigError as error:
        tell({"config_error": str(error)})


if __name__ == "__main__":
    main(sys.argv[1:])
