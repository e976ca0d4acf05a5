"""The coordinator's merges by islands and parameters: linear or not?

Question: do time and memory of a cycle of merges grow with islands and parameters, and
with nothing else? And are two workers twice as fast as one process? One process on one
core, no network: a store of 24 fragments of like pieces, radial-directional averaging,
Nesterov, int8 both ways, the route "native". Every fragment is merged from M deltas,
each checked on its arrival; of four cycles the last one is measured. With two workers
each has half of the fragments and a core, and both begin that cycle together. Extents
are multiples of 128, as those of models are, so that 100 M become 97.5 M: an array with
odd ones is a single tile, which costs five times as much to merge.

*Per merged byte* divides CPU seconds by the deltas' bytes as f32. *Memory* is what the
process holds at its peak beyond interpreter, programs and deltas, over the f32
parameters. The deltas of all fragments are the same memory, since 64 of each would not
fit. *Disk* is the bytes of a publish over the f32 parameters merged: what a merge
writes before it is committed, snapshots apart.

*Speed-up* is the time of one process over that of the slower of two. Cores may share
what limits them: *of copies* is the speed-up of as many copies of large arrays, by
which the bound is multiplied where it is below 2.

Linear means that 16 times the islands cost no more than 16 times the CPU, and that a
parameter costs alike at any size: bounds hold the cost per merged byte against that of
the smallest, with a quarter to spare for caches. A cycle of 1 B parameters and 8
islands has 32 GB of deltas as f32, which at 5 Gbit/s in int8 come in 12.8 s.

Prediction: 3.1 CPU s for that cycle, by raw/merging.md as it was then, on an
AMD EPYC; per byte falling with M, since the outer step is one for all. Two workers 1.9
times.

Command: `python -m benchmarks.coordinator_scale`; with `--again` it makes the page anew
from its raw numbers. Cost: about 7 minutes on two cores, 16 GiB of memory for the
largest (it is left out where less is free).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import support
from machine import free_bytes, resident
from merge_rate import contributions, encoded_delta, store_of

from diloco_jax.cluster.cluster import coordinator_environment
from diloco_jax.compilation import passes_of
from diloco_jax.config import OuterConfig, RunConfig
from diloco_jax.machine import give_memory_back
from diloco_jax.protocol.messages import Version

RUN = RunConfig(
    outer=OuterConfig(optimizer="nesterov", learning_rate=0.4, momentum=0.6)
)
FRAGMENTS, CODEC = 24, "int8"
COLUMNS, EXTENT = 1024, 128
ISLANDS = (1, 2, 4, 8, 16, 32, 64)
PARAMETERS = (10_000_000, 100_000_000, 1_000_000_000)
AT_ONCE = 8
"""Islands for which all sizes are measured; all numbers of islands at about 100 M."""
FREE_OVER_PARAMETERS = 4 * 4.0
"""Bytes that have to be free, per parameter: the state and a publish of each."""
CYCLE_MAX_S = 12.8
GROWTH_MAX = 1.25
WORKERS, SPEED_UP_MIN = 2, 1.8
COPY_BYTES, COPIES = 1 << 28, 12
READY = "ready\n"
CYCLES = 4
"""The last one is measured: by then memory is that of older versions."""
NAME = "coordinator_scale"
TARGET = "a cycle of 1 B x 8 islands, CPU s"


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--cycle", nargs=3, type=int, help="used by itself")
    parser.add_argument(
        "--again",
        action="store_true",
        help="make the page anew from its raw numbers, and measure nothing",
    )
    options = parser.parse_args()
    if options.cycle:
        print(json.dumps(cycle_here(*options.cycle)))
        return 0
    size = PARAMETERS[0 if options.quick else 1]
    if options.again:
        path = options.out / "raw" / f"{NAME}.json"
        raw = json.loads(path.read_bytes())
        facts = support.measured_before(raw)
        raw = {key: raw[key] for key in ("cycles", "left_out", "workers")}
    else:
        raw, facts = measure(size, quick=options.quick), None
    found, spread = raw["cycles"], raw["workers"]
    largest = max(
        (row for row in found if row["islands"] == AT_ONCE),
        key=lambda row: row["parameters"],
    )
    scaled = largest["cpu_s"] / largest["parameters"] * PARAMETERS[-1]
    checks = [support.at_most(TARGET, scaled, CYCLE_MAX_S, ".1f")]
    alike = [row for row in found if row["parameters"] == elements_of(size)]
    checks += growth("islands", alike)
    if not options.quick:
        at_once = [row for row in found if row["islands"] == AT_ONCE]
        checks += growth("parameters", at_once)
    checks.append(
        support.at_least(
            f"{WORKERS} workers: speed-up",
            spread["speed_up"],
            SPEED_UP_MIN * min(1.0, spread["of_copies"] / WORKERS),
            ".2f",
        )
    )
    rows = [
        {
            "parameters": f"{row['parameters']:,}",
            "islands": row["islands"],
            "elapsed, s": f"{row['elapsed_s']:.2f}",
            "CPU, s": f"{row['cpu_s']:.2f}",
            "CPU ns per merged byte": f"{1e9 * row['s_per_byte']:.3f}",
            "memory": f"{row['memory']:.2f}",
            "disk": f"{row['disk']:.3f}",
            "not measured": "",
        }
        for row in sorted(found, key=lambda r: (r["parameters"], r["islands"]))
    ]
    rows += [{"parameters": "", "not measured": text} for text in raw["left_out"]]
    tables = {
        "A cycle": rows,
        f"{WORKERS} workers": [
            {
                "parameters": f"{elements_of(size):,}",
                "islands": AT_ONCE,
                "one process, s": f"{spread['one_s']:.2f}",
                f"{WORKERS} workers, s": f"{spread['several_s']:.2f}",
                "speed-up": f"{spread['speed_up']:.2f}",
                "of copies": f"{spread['of_copies']:.2f}",
            }
        ],
    }
    return support.deliver(options, NAME, __doc__, tables, checks, raw, facts)


def measure(size: int, *, quick: bool) -> dict[str, Any]:
    """Return the raw numbers: cycles of every number of islands at this size, and of
    every size at one number of islands."""
    asked = [(size, islands) for islands in ((2, AT_ONCE) if quick else ISLANDS)]
    if not quick:
        asked += [(other, AT_ONCE) for other in PARAMETERS if other != size]
    found, left_out = [], []
    for parameters, islands in asked:
        if FREE_OVER_PARAMETERS * parameters > (free := free_bytes()):
            left_out.append(f"{parameters:,} parameters: {free / 1e9:.1f} GB free")
            continue
        print(
            f"{time.strftime('%H:%M:%S')} {parameters:,} x {islands}", file=sys.stderr
        )
        found += cycles(parameters, islands, 1)
    return {"cycles": found, "left_out": left_out, "workers": speed_up(size)}


def side_of(parameters: int) -> int:
    """Return the rows of each fragment's array: a multiple of EXTENT."""
    return parameters // FRAGMENTS // COLUMNS // EXTENT * EXTENT


def elements_of(parameters: int) -> int:
    """Return the parameters that a cycle has which is asked for so many."""
    return FRAGMENTS * side_of(parameters) * COLUMNS


def speed_up(parameters: int) -> dict[str, float]:
    """Return the seconds of a cycle of one process and of several, and how many times
    as fast these are, in merging and in copying."""
    one = cycles(parameters, AT_ONCE, 1)
    several = cycles(parameters, AT_ONCE, WORKERS)
    one_s = one[0]["elapsed_s"]
    several_s = max(row["elapsed_s"] for row in several)
    slowest = max(row["copy_s"] for row in several)
    return {
        "one_s": one_s,
        "several_s": several_s,
        "speed_up": one_s / several_s,
        "of_copies": WORKERS * one[0]["copy_s"] / slowest,
    }


def growth(what: str, rows: list[dict[str, Any]]) -> list[support.Check]:
    """Check that nothing costs more per merged byte than with the fewest."""
    rows = sorted(rows, key=lambda row: row[what])
    return support.each(
        f"{what}: per merged byte over the fewest",
        (
            support.at_most(
                f"{row[what]:,} {what}: per merged byte over {rows[0][what]:,}",
                row["s_per_byte"] / rows[0]["s_per_byte"],
                GROWTH_MAX,
            )
            for row in rows[1:]
        ),
    )


def cycles(parameters: int, islands: int, workers: int) -> list[dict[str, Any]]:
    """Measure that many processes, each with its share of the fragments and a core of
    its own, with the coordinator's environment."""
    cores = sorted(os.sched_getaffinity(0))[-workers:]
    sizes = map(str, (parameters, islands, workers))
    words = [sys.executable, __file__, "--cycle", *sizes]
    env = {**os.environ, **coordinator_environment(), "JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    ["taskset", "--cpu-list", str(core), *words],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for core in cores
        ]
        for _ in range(2):  # Before the copies and before the cycle: together.
            for process in processes:
                assert process.stdout is not None
                if process.stdout.readline() != READY:
                    raise support.RunError("a process of the benchmark failed")
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
        told = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise support.RunError("a process of the benchmark failed")
    return [json.loads(text) for text in told]


def cycle_here(parameters: int, islands: int, workers: int) -> dict[str, Any]:
    """Merge every fragment of one worker, of that many."""
    count, passes = FRAGMENTS // workers, passes_of("native")
    shape = (side_of(parameters), COLUMNS)
    elements = count * shape[0] * COLUMNS
    small = store_of(RUN, CODEC, {"w": shape}, 1, passes)
    payload = encoded_delta(small, CODEC, 0, 0)
    parts = contributions(islands)
    # Each its own memory, as deltas of islands have.
    payloads = [payload, *(payload.copy() for _ in range(islands - 1))]
    merged = small.merge(
        0,
        parts,
        payloads,
        [small.squares(0, payload)] * islands,
        final=False,
    )
    written = merged.payload.nbytes
    del small, merged
    give_memory_back()
    before = resident("VmRSS")
    shapes = {f"w{i:02}": shape for i in range(count)}
    store = store_of(RUN, CODEC, shapes, count, passes)

    def merge_all(number: int) -> None:
        for fragment in range(count):
            squares = [store.squares(fragment, payload) for payload in payloads]
            merged = store.merge(fragment, parts, payloads, squares, final=False)
            store.commit(fragment, Version(1, 1 + number), merged)

    for number in range(CYCLES - 1):
        merge_all(number)
    peak = resident("VmHWM") - before
    copy_s = together(copy_many)
    cpu_began = time.process_time()
    elapsed_s = together(lambda: merge_all(CYCLES - 1))
    cpu_s = time.process_time() - cpu_began
    return {
        "parameters": elements,
        "islands": islands,
        "cpu_s": cpu_s,
        "elapsed_s": elapsed_s,
        "copy_s": copy_s,
        "s_per_byte": cpu_s / (4 * elements * islands),
        "memory": max(peak, 0) / (4 * elements),
        "disk": count * written / (4 * elements),
    }


def together(work: Callable[[], object]) -> float:
    """Say that this process is ready, wait for the others, and return the seconds of
    the work."""
    print(READY, end="", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    work()
    return time.monotonic() - began


def copy_many() -> None:
    """Copy large arrays, which is as fast as memory is."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.ones_like(source)
    for _ in range(COPIES):
        np.copyto(target, source)


if __name__ == "__main__":
    support.script(main)
