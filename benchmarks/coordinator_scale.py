"""The coordinator's merges by islands and parameters: linear or not?

Question: do time and memory of a cycle of merges grow with islands and parameters, and
with nothing else? One process on one core, no network: a store of 24 fragments of like
pieces, radial-directional averaging, Nesterov, int8 both ways, the route "native".
Every fragment is merged from M deltas, each checked on its arrival; of three cycles the
last one is measured.

*Per merged byte* divides CPU seconds by the deltas' bytes as f32. *Memory* is what the
process holds at its peak beyond interpreter, programs and deltas, over the f32
parameters. The deltas of all fragments are the same memory, since 64 of each would not
fit. *Disk* is the bytes of a publish over the f32 parameters merged: what a merge
writes before it is committed, snapshots apart.

Linear means that 16 times the islands cost no more than 16 times the CPU, and that a
parameter costs alike at any size: bounds hold the cost per merged byte against that of
the smallest, with a quarter to spare for caches. A cycle of 1 B parameters and 8
islands has 32 GB of deltas as f32, which at 5 Gbit/s in int8 come in 12.8 s.

Prediction: 3.1 CPU s for that cycle, by docs/results/merging.md; per byte falling with
M, since the outer step is one for all.

Command: `python -m benchmarks.coordinator_scale`. Cost: about 5 minutes on one core,
16 GiB of memory for the largest (it is left out where less is free).
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from typing import Any

import support

from diloco_jax.cluster.commands import coordinator_environment
from diloco_jax.config import OuterConfig, RunConfig
from diloco_jax.memory import give_back
from diloco_jax.merge_route import passes_of
from diloco_jax.planning.merge_rate import contributions, encoded_delta, store_of
from diloco_jax.protocol.values import Version

RUN = RunConfig(
    outer=OuterConfig(optimizer="nesterov", learning_rate=0.4, momentum=0.6)
)
FRAGMENTS, CODEC = 24, "int8"
ISLANDS = (1, 2, 4, 8, 16, 32, 64)
PARAMETERS = (10_000_000, 100_000_000, 1_000_000_000)
AT_ONCE = 8
"""Islands for which all sizes are measured; all numbers of islands at 100 M."""
FREE_OVER_PARAMETERS = 4 * 4.0
"""Bytes that have to be free, per parameter: the state and a publish of each."""
CYCLE_MAX_S = 12.8
GROWTH_MAX = 1.25
CYCLES = 3
"""The last one is measured: by then memory is that of older versions."""
TARGET = "a cycle of 1 B x 8 islands, CPU s"


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--cycle", nargs=2, type=int, help="used by itself")
    options = parser.parse_args()
    if options.cycle:
        print(json.dumps(cycle_here(*options.cycle)))
        return 0
    asked = [(PARAMETERS[1], islands) for islands in ISLANDS]
    asked += [(size, AT_ONCE) for size in PARAMETERS if size != PARAMETERS[1]]
    if options.quick:
        asked = [(PARAMETERS[0], islands) for islands in (2, AT_ONCE)]
    found, left_out = [], []
    for size, islands in asked:
        if FREE_OVER_PARAMETERS * size > free_bytes():
            left_out.append(f"{size:,} parameters: {free_bytes() / 1e9:.1f} GB free")
            continue
        print(f"{time.strftime('%H:%M:%S')} {size:,} x {islands}", file=sys.stderr)
        found.append(cycle(size, islands))
    largest = max(
        (row for row in found if row["islands"] == AT_ONCE),
        key=lambda row: row["parameters"],
    )
    scaled = largest["cpu_s"] / largest["parameters"] * PARAMETERS[-1]
    checks = [support.at_most(TARGET, scaled, CYCLE_MAX_S, ".1f")]
    checks += growth("islands", [r for r in found if r["parameters"] == asked[0][0]])
    checks += growth("parameters", [r for r in found if r["islands"] == AT_ONCE])
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
    rows += [{"parameters": "", "not measured": text} for text in left_out]
    raw = {"cycles": found, "left_out": left_out}
    return support.deliver(
        options, "coordinator_scale", __doc__, {"A cycle": rows}, checks, raw
    )


def growth(what: str, rows: list[dict[str, Any]]) -> list[support.Check]:
    """Check that nothing costs more per merged byte than with the fewest."""
    rows = sorted(rows, key=lambda row: row[what])
    return [
        support.at_most(
            f"{row[what]:,} {what}: per merged byte over {rows[0][what]:,}",
            row["s_per_byte"] / rows[0]["s_per_byte"],
            GROWTH_MAX,
        )
        for row in rows[1:]
    ]


def cycle(parameters: int, islands: int) -> dict[str, Any]:
    """Measure in a process of its own, with the coordinator's environment."""
    core = str(max(os.sched_getaffinity(0)))
    command = ["taskset", "--cpu-list", core, sys.executable, __file__]
    command += ["--cycle", str(parameters), str(islands)]
    env = {**os.environ, **coordinator_environment(), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cycle_here(parameters: int, islands: int) -> dict[str, Any]:
    """Merge every fragment once."""
    side = math.isqrt(parameters // FRAGMENTS)
    passes, elements = passes_of("native"), FRAGMENTS * side * side
    small = store_of(RUN, CODEC, {"w": (side, side)}, 1, passes)
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
    give_back()
    before = resident("VmRSS")
    shapes = {f"w{i:02}": (side, side) for i in range(FRAGMENTS)}
    store = store_of(RUN, CODEC, shapes, FRAGMENTS, passes)
    for number in range(CYCLES):
        began, cpu_began = time.monotonic(), time.process_time()
        for fragment in range(FRAGMENTS):
            squares = [store.squares(fragment, payload) for payload in payloads]
            merged = store.merge(fragment, parts, payloads, squares, final=False)
            store.commit(fragment, Version(1, 1 + number), merged)
    cpu, elapsed = time.process_time() - cpu_began, time.monotonic() - began
    return {
        "parameters": elements,
        "islands": islands,
        "cpu_s": cpu,
        "elapsed_s": elapsed,
        "s_per_byte": cpu / (4 * elements * islands),
        "memory": (resident("VmHWM") - before) / (4 * elements),
        "disk": FRAGMENTS * written / (4 * elements),
    }


def resident(field: str) -> int:
    """Return a figure of this process's memory, in bytes."""
    return 1024 * of_kernel("/proc/self/status", field)


def free_bytes() -> int:
    """Return the memory that processes may still take."""
    return 1024 * of_kernel("/proc/meminfo", "MemAvailable")


def of_kernel(path: str, field: str) -> int:
    """Return a number of such a file."""
    with open(path) as lines:
        return int(
            next(line for line in lines if line.startswith(f"{field}:")).split()[1]
        )


if __name__ == "__main__":
    sys.exit(main())
