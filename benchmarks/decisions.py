"""Time per decision of the coordinator's half, by event, at up to 64 islands.

Islands run in virtual time under the production protocol: one step a second each, a
report at every step, every delta arriving after its take. Each event of the coordinator
is timed alone, in CPU seconds of its thread, with the search for the next deadline that
the lead makes after it.

    python benchmarks/decisions.py --out docs/results/raw/decisions.json
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from machine import machine_facts

from diloco_jax.config import Placement, RunConfig, SyncConfig
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.events import Event, Said
from diloco_jax.simulation.virtual.island import IslandSpec
from diloco_jax.simulation.virtual.line import LineSpeed
from diloco_jax.simulation.virtual.merging import NoArrays
from diloco_jax.simulation.virtual.world import World

FLEETS = ((2, 48), (16, 48), (64, 48), (64, 192))
"""Islands and fragments."""
STEPS_PER_CYCLE = 96
CYCLES = 4
PARAMETERS = 12_000_000_000


class Timed:
    """The decisions of a coordinator, each timed."""

    def __init__(self, world: World) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._coordinator, self._decide = world.coordinator, world.coordinator.decide

    def __call__(self, event: Event, now: float) -> Any:
        """Decide, and search the next deadline as the lead does."""
        began = time.thread_time()
        effects = self._decide(event, now)
        decide.next_deadline(self._coordinator.state, now)
        seconds = time.thread_time() - began
        what = event.message if isinstance(event, Said) else event
        self.seconds.setdefault(type(what).__name__, []).append(seconds)
        return effects


def make_world(islands: int, fragments: int, quorum: int) -> World:
    """Return a run of islands of about one speed."""
    sync = SyncConfig(
        steps_per_cycle=STEPS_PER_CYCLE, fragments=fragments, quorum=quorum
    )
    run = RunConfig(sync=sync, sequence_length=1000, total_tokens=1 << 60)
    budget_s = 100.0
    placement = Placement(time_budget_s=budget_s, outage_budget_s=budget_s)
    sizes = (PARAMETERS // fragments,) * fragments
    config = policy_config(run, placement, "decisions", sizes)
    link = LineSpeed(latency_s=0.02, up_bytes_per_s=6e8, down_bytes_per_s=6e8)
    world = World(
        run,
        config,
        NoArrays(bytes_down=sizes, bytes_full=tuple(4 * size for size in sizes)),
        report_s=budget_s / 2,
        line_speed=link,
        merge_seconds=lambda merge: 0.3,
    )
    for number in range(islands):
        step_s = 1.0 + 0.1 * number / islands
        spec = IslandSpec(
            name=f"island-{number:02d}",
            batch_size=1,
            step_seconds=lambda _, step_s=step_s: step_s,
            bytes_up=sizes,
        )
        world.start(spec)
    return world


def measure(islands: int, fragments: int, cycles: int) -> dict[str, Any]:
    """Return seconds per event of a run in virtual time."""
    world = make_world(islands, fragments, quorum=max(1, islands // 2))
    timed = Timed(world)
    world.run(STEPS_PER_CYCLE)  # All join; the first merges.
    world.coordinator.decide = timed  # type: ignore[method-assign]
    # Collections of the simulator's own heap would be counted as decisions.
    gc.collect()
    gc.disable()
    state = world.coordinator.state
    merges = -sum(fragment.merges for fragment in state.fragments)
    world.run(STEPS_PER_CYCLE * (1 + cycles))
    gc.enable()
    state = world.coordinator.state
    merges += sum(fragment.merges for fragment in state.fragments)
    every = sorted(itertools.chain.from_iterable(timed.seconds.values()))
    wall_s = STEPS_PER_CYCLE * cycles
    return {
        "islands": islands,
        "fragments": fragments,
        "merges": merges,
        "events": len(every),
        "events_per_second": len(every) / wall_s,
        "share_of_a_core": sum(every) / wall_s,
        "mean_ms": 1e3 * statistics.fmean(every),
        "p99_ms": 1e3 * every[int(0.99 * len(every))],
        "max_ms": 1e3 * every[-1],
        "by_event_ms": {
            kind: {
                "count": len(seconds),
                "mean": 1e3 * statistics.fmean(seconds),
                "max": 1e3 * max(seconds),
            }
            for kind, seconds in sorted(timed.seconds.items())
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=CYCLES)
    parser.add_argument("--out", type=Path, help="JSON file for the raw results")
    options = parser.parse_args()
    rows = []
    for islands, fragments in FLEETS:
        row = measure(islands, fragments, options.cycles)
        rows.append(row)
        print(
            f"{islands:3d} islands, {fragments:3d} fragments: {row['merges']} merges, "
            f"{row['events_per_second']:.0f} events/s, mean {row['mean_ms']:.3f} ms, "
            f"p99 {row['p99_ms']:.3f} ms, max {row['max_ms']:.2f} ms, "
            f"{row['share_of_a_core']:.2%} of a core"
        )
        for kind, found in row["by_event_ms"].items():
            print(f"    {kind:14s} {found['count']:6d} x {found['mean']:.3f} ms")
    if options.out:
        result = {**machine_facts(), "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
