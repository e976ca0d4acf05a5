"""Time per decision of the coordinator's half, by event, at up to 64 islands.

Question: what does one event cost the thread of decisions, and what does a status cost
it twice a second? Islands run in virtual time under the production protocol: one step a
second each, a report at every step, every delta arriving after its take, H = 96 steps.
Each event is timed alone, in CPU seconds of its thread, with the search for the next
deadline that the lead makes after it.

Prediction, before the first run, for 64 islands and 48 fragments: 0.12 ms per report,
2 ms per merge, 1.5 % of a core. Found: 0.05 ms, 0.3 ms and 0.4 %. Every event looks at
all islands a few times (deadlines, ticks, progress), which is cheap; none looks at
islands times fragments, but for a status and the summary.

Command: `python benchmarks/decisions.py`. Cost: two minutes.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import support

from diloco_jax.config import Placement, RunConfig, SyncConfig
from diloco_jax.coordinator import summary
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.state import Event, Said
from diloco_jax.protocol.messages import Measures, Report
from diloco_jax.simulation.clock import LineSpeed
from diloco_jax.simulation.coordinator import NoArrays, World
from diloco_jax.simulation.island import IslandSpec

FLEETS = ((2, 48), (16, 48), (64, 48), (64, 192))
"""Islands and fragments."""
STEPS_PER_CYCLE = 96
CYCLES = 4
PARAMETERS = 12_000_000_000
REFRESH_S, STATUSES = 0.5, 20
CORES_MAX = 0.02


class Timed:
    """The decisions of a coordinator, each timed."""

    def __init__(self, world: World) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.roster = Roster()
        self._coordinator, self._decide = world.coordinator, world.coordinator.decide

    def __call__(self, event: Event, now: float) -> Any:
        """Decide, and search the next deadline as the lead does."""
        began = time.thread_time()
        effects = self._decide(event, now)
        decide.next_deadline(self._coordinator.state, now)
        seconds = time.thread_time() - began
        what = event.message if isinstance(event, Said) else event
        if isinstance(what, Report):
            assert isinstance(event, Said)
            self._told(event.island, what, now)
        self.seconds.setdefault(type(what).__name__, []).append(seconds)
        return effects

    def _told(self, name: str, report: Report, now: float) -> None:
        island = self._coordinator.state.islands[name]
        if name not in self.roster.members:
            self.roster.hello(_Incarnation(name, 1, island.tokens_per_step), now)
        measures = Measures(
            steps=report.steps,
            median_step_seconds=report.step_seconds,
            first_step_unix=1.0,
            last_step_unix=now,
            loss=2.5,
            eval_loss=2.5,
        )
        self.roster.report(name, measures, report.records, now)

    def status(self) -> tuple[float, int]:
        """Return the CPU seconds of a status, and its bytes."""
        coordinator, now = self._coordinator, self._coordinator.clock.now
        began = time.thread_time()
        shown = summary.status(
            coordinator.config,
            coordinator.state,
            self.roster,
            seconds=now,
            alerts=[],
            now=now,
        )
        seconds = time.thread_time() - began
        return seconds, len(json.dumps(shown))


class _Incarnation(NamedTuple):
    island: str
    incarnation: int
    tokens_per_step: int


def make_world(islands: int, fragments: int, quorum: int) -> World:
    """Return a run of islands of about one speed."""
    sync = SyncConfig(
        steps_per_cycle=STEPS_PER_CYCLE,
        overlap_steps=2,
        fragments=fragments,
        quorum=quorum,
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
            step_seconds=always(step_s),
            bytes_up=sizes,
        )
        world.start(spec)
    return world


def always(step_s: float) -> Callable[[int], float]:
    """Return the seconds of each step of an island: the same ones."""
    return lambda step: step_s


def measure(islands: int, fragments: int, cycles: int) -> dict[str, Any]:
    """Return seconds per event of a run in virtual time, and of statuses in it."""
    world = make_world(islands, fragments, quorum=max(1, islands // 2))
    timed, coordinator = Timed(world), world.coordinator
    world.run(STEPS_PER_CYCLE)  # All join; the first merges.
    coordinator.decide = timed  # type: ignore[method-assign]
    # Collections of the simulator's own heap would be counted as decisions.
    gc.collect()
    gc.disable()
    merges = -sum(fragment.merges for fragment in coordinator.state.fragments)
    world.run(STEPS_PER_CYCLE * (1 + cycles))
    merges += sum(fragment.merges for fragment in coordinator.state.fragments)
    every = sorted(itertools.chain.from_iterable(timed.seconds.values()))
    by_event = {kind: 1e3 * statistics.fmean(s) for kind, s in timed.seconds.items()}
    statuses = []
    for _ in range(STATUSES):
        statuses.append(timed.status())
        world.run(world.clock.now + REFRESH_S)
    gc.enable()
    wall_s = STEPS_PER_CYCLE * cycles
    return {
        "islands": islands,
        "fragments": fragments,
        "merges": merges,
        "events": len(every),
        "events_per_second": len(every) / wall_s,
        "cores": sum(every) / wall_s,
        "mean_ms": 1e3 * statistics.fmean(every),
        "p99_ms": 1e3 * every[int(0.99 * len(every))],
        "by_event_ms": dict(sorted(by_event.items())),
        "status_ms": 1e3 * statistics.fmean(seconds for seconds, _ in statuses),
        "status_bytes": statuses[0][1],
    }


def row(found: dict[str, Any]) -> dict[str, str]:
    """Return a line of the table."""
    return {
        "islands": f"{found['islands']}",
        "fragments": f"{found['fragments']}",
        "events/s": f"{found['events_per_second']:.0f}",
        "mean, ms": f"{found['mean_ms']:.3f}",
        "99 %, ms": f"{found['p99_ms']:.3f}",
        "a report, ms": f"{found['by_event_ms']['Report']:.3f}",
        "a merge, ms": f"{found['by_event_ms']['MergePrepared']:.3f}",
        "cores": f"{found['cores']:.4f}",
        "a status, ms": f"{found['status_ms']:.2f}",
        "a status, kB": f"{found['status_bytes'] / 1e3:.1f}",
    }


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--cycles", type=int, default=CYCLES)
    options = parser.parse_args()
    found = [measure(*fleet, options.cycles) for fleet in FLEETS]
    reference = next(f for f in found if (f["islands"], f["fragments"]) == (64, 48))
    return support.write_results(
        options.out,
        "decisions",
        __doc__,
        {"By fleet": [row(each) for each in found]},
        [
            support.at_most(
                "cores, 64 islands of 48 fragments", reference["cores"], CORES_MAX
            )
        ],
        {"fleets": found},
    )


if __name__ == "__main__":
    sys.exit(main())
