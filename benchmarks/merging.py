"""The coordinator's merges: time and memory.

Question: what does one merge cost the coordinator, from the arrival of its deltas to
the encoded publish, and what does it hold? One process, no network; radial-directional
averaging, Nesterov, the same codec up and down.

Time: a fragment of one piece of 16 Mi elements, merged from 2 to 16 deltas, by both
merge routes in turns; then by "native" other sizes (Mi), numbers of deltas and rules.
*Check* is the pass over each delta on its arrival, *merge* all that follows, the digest
of Theta too, and *write* makes the publish durable. All are process CPU seconds, the
least of several repetitions. *Over its arithmetic* divides checks, merge and write by
what the same functions take of as many deltas on one tile again and again, which a
core's own cache holds: what memory, digest, disk and Python add. *Replay* is recovery's
pass over one publish.

Memory: a store of 85 M parameters in 24 fragments of like pieces, int8, two deltas per
merge, three cycles. It is what the process holds beyond interpreter, compiled programs
and deltas, over the f32 parameters: *state* after the cycles, *peak* at any time, the
retained publishes of int8 (1.0) in both. The peak of one merge of a fragment of 16 Mi
elements stands apart, for 2 and for 16 deltas.

Rules but RDA have no bound: `mean` and `clipped_mean` are weighted sums like it, and
take about as long. `trimmed_mean` is computed by XLA on either route. It sorted each
element's deltas by itself at first (`argsort`), which took 38, 53 and 126 times what
`mean` takes of 2, 8 and 64 deltas; a network of comparators is one loop.

Prediction, before the ratio was taken: 1.3 for 16 deltas, 2 for two of them, where
memory moves most for each that is computed, and f32 above the codecs with fewer bytes.

Command: `python benchmarks/merging.py`; with `--rules` the other rules alone are
measured anew. Cost: about 11 minutes on one core, 20 GiB of memory; what does not fit
into the memory that is free is left out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import support
from machine import free_bytes, resident
from merge_rate import (
    ELEMENTS,
    SIDE,
    TILE,
    arithmetic,
    contributions,
    encoded_delta,
    store_of,
    time_merges,
)

from diloco_jax.cluster.cluster import coordinator_environment
from diloco_jax.compilation import Route, passes_of
from diloco_jax.config import OuterConfig, RunConfig, SyncConfig
from diloco_jax.core.codecs import get_codec
from diloco_jax.machine import give_memory_back
from diloco_jax.protocol.messages import Version

RUN = RunConfig(
    outer=OuterConfig(optimizer="nesterov", learning_rate=0.4, momentum=0.6)
)
RULES = ("mean", "clipped_mean", "trimmed_mean")
ISLANDS = (2, 4, 6, 8, 16)
CODECS = ("f32", "bf16", "int8", "int4")
LAYERS, FRAGMENTS = 24, 24
LAYER_SIDE = 1882
"""24 layers of this side squared are 85 M parameters."""
CYCLES = 3
MEMORY_MAX = 1.1 * (3 + 3 / FRAGMENTS + 1)
"""Memory over f32 parameters: 10 % above the state, one merge and the publishes."""
OVER_MAX = {"f32": 4.5, "bf16": 3.5, "int8": 3.0, "int4": 2.5}
"""A merge until it is durable over its arithmetic, by codec: what moves counts most
where most moves for each element."""
ROUTES: dict[Route, tuple[int, ...]] = {"native": ISLANDS, "xla": (2, 6, 16)}
"""Numbers of deltas by route."""
GROWTH_MAX = 1.15
"""Peak of a merge of 16 deltas over that of a merge of 2."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """A fragment of `rows * SIDE` elements, merged from deltas of `islands` islands."""

    codec: str
    islands: int
    rows: int = SIDE
    merge: str = "rda"
    route: Route = "native"

    @property
    def nbytes(self) -> int:
        """Bytes of memory that a measurement takes, about: deltas, one more of them,
        and six f32 arrays."""
        elements = self.rows * SIDE
        each = get_codec(self.codec).tile_bytes(TILE * TILE) / (TILE * TILE)
        return int(elements * (each * (self.islands + 1) + 24))


BEYOND = (
    *(Cell(codec, islands) for codec in CODECS for islands in (32, 64)),
    *(Cell(codec, 8, rows) for codec in CODECS for rows in (4 * SIDE, 16 * SIDE)),
    *(Cell(codec, 64, 4 * SIDE) for codec in ("bf16", "int8", "int4")),
    *(Cell(codec, 32, 16 * SIDE) for codec in ("int8", "int4")),
    *(Cell("int8", m, SIDE // 4, rule) for rule in RULES for m in (2, 8, 64)),
)
"""Cells that "native" alone measures, each in a process of its own."""


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--rules", action="store_true", help="measure the other rules alone anew"
    )
    parser.add_argument("--cell", type=int, help="used by itself")
    parser.add_argument("--memory", choices=("store", "2", "16"), help="used by itself")
    parser.add_argument("--time", choices=CODECS, help="used by itself")
    parser.add_argument(
        "--measured",
        nargs=4,
        metavar=("FILE", "ROUTE", "CODEC", "DELTAS"),
        help="add what such a merge took to a file for `diloco plan --measured`",
    )
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    if options.memory:
        print(json.dumps(memory_here(options.memory)))
        return 0
    if options.time:
        print(json.dumps(list(times_here(options.time, options.repetitions))))
        return 0
    if options.cell is not None:
        print(json.dumps(timed(BEYOND[options.cell], options.repetitions)))
        return 0
    repetitions = ["--repetitions", str(options.repetitions)]

    def cells(rules: Sequence[str]) -> list[dict[str, Any]]:
        return [
            here("--cell", str(number), *repetitions)
            for number, cell in enumerate(BEYOND)
            if cell.merge in rules and cell.nbytes < free_bytes()
        ]

    facts = None
    if options.rules and options.measured:
        parser.error("--measured with --rules: no merge of its cells is made now")
    if options.rules:
        raw = json.loads((options.out / "raw" / "merging.json").read_bytes())
        facts, rows, memory = support.measured_before(raw), raw["time"], raw["memory"]
        beyond = [row for row in raw["beyond"] if row["merge"] == "rda"]
    else:
        rows = [r for codec in CODECS for r in here("--time", codec, *repetitions)]
        beyond = cells(["rda"])
        memory = {what: here("--memory", what) for what in ("store", "2", "16")}
    others, day = cells(RULES), time.strftime("%Y-%m-%d")
    state, peak = (memory["store"][key] for key in ("state", "peak"))
    growth = memory["16"]["peak"] / memory["2"]["peak"]
    native = (bound_of(row) for row in rows if row["route"] == "native")
    checks = support.each("the route native: over its arithmetic", native)
    larger = (bound_of(row) for row in beyond if row["merge"] == "rda")
    checks += support.each("other sizes: over its arithmetic", larger)
    checks += [
        support.at_most("memory after three cycles", state, MEMORY_MAX),
        support.at_most("memory at its peak", peak, MEMORY_MAX),
        support.at_most("peak of a merge of 16 deltas over 2", growth, GROWTH_MAX),
    ]
    if options.measured:
        path, *like = options.measured
        of = [r["seconds_per_1e9_parameters"] for r in rows if like_cell(r, like)]
        if not of:
            parser.error(f"no merge of {' '.join(like)} was measured: --measured")
        support.write_measured(Path(path), merge_core_seconds=of[0])
    return support.write_results(
        options.out,
        "merging",
        __doc__,
        {
            **{
                f"Time, route {route}": [
                    time_row(r) for r in rows if r["route"] == route
                ]
                for route in ROUTES
            },
            "Other sizes and numbers of deltas": [
                {"Mi": r["elements"] >> 20, **time_row(r)} for r in beyond
            ],
            f"Other rules, {day}": [
                {"rule": r["merge"], "Mi": r["elements"] >> 20, **time_row(r)}
                for r in others
            ],
            "Memory": memory_rows(memory),
        },
        checks,
        {"time": rows, "beyond": [*beyond, *others], "memory": memory},
        facts=facts,
    )


def like_cell(row: dict[str, Any], like: Sequence[str]) -> bool:
    """Tell if a row is of this route, codec and number of deltas."""
    return [row["route"], row["codec"], str(row["islands"])] == list(like)


def bound_of(row: dict[str, Any]) -> support.Check:
    """Return the bound on a merge over its arithmetic."""
    size = f", {row['elements'] >> 20} Mi" if row["elements"] != ELEMENTS else ""
    name = f"{row['codec']}, {row['islands']} deltas{size}: over its arithmetic"
    return support.at_most(name, row["over_arithmetic"], OVER_MAX[row["codec"]])


def timed(cell: Cell, repetitions: int) -> dict[str, Any]:
    """Measure checks, merge and write, and the arithmetic of both alone."""
    run = dataclasses.replace(RUN, sync=SyncConfig(merge=cell.merge))
    passes, islands = passes_of(cell.route), cell.islands
    shape = cell.rows, SIDE
    best = time_merges(run, cell.codec, islands, repetitions, passes, shape)
    elements, whole = cell.rows * SIDE, islands * best.check + best.merge
    own: dict[str, float] = {}
    if passes is not None:  # By XLA a call costs more than a tile.
        alone = elements * arithmetic(run, cell.codec, islands, passes)
        own = {
            "arithmetic_seconds": alone,
            "over_arithmetic": (whole + best.write) / alone,
        }
    return {
        "route": cell.route,
        "codec": cell.codec,
        "islands": islands,
        "merge": cell.merge,
        "elements": elements,
        "check_seconds": best.check,
        "merge_seconds": best.merge,
        "write_seconds": best.write,
        **own,
        "replay_seconds": best.replay,
        "seconds_per_1e9_parameters": whole / elements * 1e9,
    }


def times_here(codec: str, repetitions: int) -> Iterator[dict[str, Any]]:
    """Measure one codec, the routes in turns."""
    for islands in ISLANDS:
        for route, measured in ROUTES.items():
            if islands in measured:
                yield timed(Cell(codec, islands, route=route), repetitions)


def here(*arguments: str) -> Any:
    """Measure in a process of its own, with the coordinator's environment."""
    command = [sys.executable, __file__, *arguments]
    env = {**os.environ, **coordinator_environment()}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def memory_here(what: str) -> dict[str, float]:
    """Return memory over the f32 parameters: of a store, or of one merge of that many
    deltas while it is computed."""
    if what == "store":
        sides = (LAYER_SIDE, LAYER_SIDE)
        return store_memory({f"w{i:02}": sides for i in range(LAYERS)})
    islands = int(what)
    store = store_of(RUN, "int8", {"w": (SIDE, SIDE)}, 1, passes_of("native"))
    payloads = [encoded_delta(store, "int8", 0, seed) for seed in range(islands)]
    parts = contributions(islands)
    squares = [store.squares(0, payload) for payload in payloads]
    merged = store.merge(0, parts, payloads, squares, final=False)
    store.commit(0, Version(1, 1), merged)
    del merged
    before = settled()
    store.merge(0, parts, payloads, squares, final=False)
    return {"peak": (resident("VmHWM") - before) / (4 * ELEMENTS)}


def store_memory(shapes: dict[str, tuple[int, ...]]) -> dict[str, float]:
    """Return memory after the cycles and at its peak."""
    passes = passes_of("native")
    small = store_of(RUN, "int8", {"w": (LAYER_SIDE, LAYER_SIDE)}, 1, passes)
    payload = encoded_delta(small, "int8", 0, 0)
    payloads, parts = [payload, payload], contributions(2)
    squares = [small.squares(0, payload)] * 2
    merged = small.merge(0, parts, payloads, squares, final=False)
    del small, merged
    base = settled()
    store = store_of(RUN, "int8", shapes, FRAGMENTS, passes)
    give_memory_back()
    for number in range(1, CYCLES + 2):
        for fragment in range(FRAGMENTS):
            merged = store.merge(fragment, parts, payloads, squares, final=False)
            store.commit(fragment, Version(1, number), merged)
            give_memory_back()
    del merged
    peak, state = resident("VmHWM"), settled()
    f32 = 4 * store.plan.total
    return {"state": (state - base) / f32, "peak": (peak - base) / f32}


def settled() -> int:
    """Return the memory held once freed memory is given back; the peak starts anew."""
    give_memory_back()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def time_row(row: dict[str, Any]) -> dict[str, Any]:
    """One row of the page."""
    over = row.get("over_arithmetic")
    return {
        "codec": row["codec"],
        "deltas": row["islands"],
        "check of one, ms": f"{1e3 * row['check_seconds']:.1f}",
        "merge, ms": f"{1e3 * row['merge_seconds']:.1f}",
        "write, ms": f"{1e3 * row['write_seconds']:.1f}",
        "over its arithmetic": f"{over:.2f}" if over else "",
        "replay, ms": f"{row['replay_seconds'] * 1e3:.0f}",
        "CPU s per 1e9 parameters": f"{row['seconds_per_1e9_parameters']:.1f}",
    }


def memory_rows(memory: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The rows of the page."""
    store = memory["store"]
    rows = [("store after three cycles", store["state"])]
    rows.append(("store at its peak", store["peak"]))
    rows += [
        (f"one merge of {islands} deltas, at its peak", memory[islands]["peak"])
        for islands in ("2", "16")
    ]
    return [
        {"what": what, "over f32 parameters": f"{value:.2f}"} for what, value in rows
    ]


if __name__ == "__main__":
    sys.exit(main())
