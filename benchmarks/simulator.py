"""The speed of the simulator.

Question: how long does a day of 2.4 million chips take, and how many schedules of
faults are played in a minute? A day is `diloco simulate goodput` with 16 islands, one
seed: the product's protocol in virtual time. Schedules are those of `diloco simulate
faults`. *Events* are calls of the virtual clock.

Seconds are CPU seconds of the process, after imports: one thread works. The first
schedules, which fill caches, are left out. A Python that is built with profile-guided
optimization, as a distribution's is, plays 1.15 times as many as one without.

Prediction: 20 s for the day, 1500 schedules a minute.

Command: `python -m benchmarks.simulator`. Cost: about 5 minutes on one
core, 70 s with `--repeats 1`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import support

from diloco_jax.simulation.clock import Clock
from diloco_jax.simulation.faults.play import check
from diloco_jax.simulation.goodput import GoodputConfig, simulate_goodput

CHIPS, ISLANDS = 2_400_000, 16
DAY_MAX_S = 30.0
SCHEDULES_MIN = 1000.0
"""Per minute."""
DAY_HOURS = 24.0
WARM_SCHEDULES = 5


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--schedules", type=int, default=1000, help="of each repeat")
    options = parser.parse_args()
    hours, repeats, schedules = DAY_HOURS, options.repeats, options.schedules
    if options.quick:
        hours, repeats, schedules = 1.0, 1, 40
    check(range(WARM_SCHEDULES))
    days = [timed(lambda: day(hours)) for _ in range(repeats)]
    played = [
        timed(lambda first=first: play(first, schedules))  # type: ignore[misc]
        for first in range(WARM_SCHEDULES, repeats * schedules, schedules)
    ]
    # A day is as many hours: there is one event per stop and step.
    day_s = [DAY_HOURS / hours * one["seconds"] for one in days]
    per_minute = [60 * schedules / one["seconds"] for one in played]
    rows = [
        {
            "what": f"{DAY_HOURS:g} h of {CHIPS:,} chips, {ISLANDS} islands",
            "CPU s": support.spread(day_s, ".1f"),
            "events per s": support.spread([one["rate"] for one in days], ",.0f"),
        },
        {
            "what": "a schedule of faults",
            "CPU s": support.spread([60 / rate for rate in per_minute]),
            "events per s": support.spread([one["rate"] for one in played], ",.0f"),
        },
    ]
    checks = [
        support.at_most("CPU s of the day", statistics.median(day_s), DAY_MAX_S, ".1f"),
        support.at_least(
            "schedules a minute", statistics.median(per_minute), SCHEDULES_MIN, ".0f"
        ),
    ]
    raw = {"hours": hours, "days": days, "schedules": schedules, "played": played}
    return support.deliver(options, "simulator", __doc__, {"Speed": rows}, checks, raw)


def day(hours: float) -> None:
    """Simulate so many hours."""
    simulate_goodput(GoodputConfig(chips=CHIPS, islands=ISLANDS, hours=hours, seeds=1))


def play(first: int, count: int) -> None:
    """Play schedules; raise RunError if one violates an invariant."""
    report = check(range(first, first + count))
    if report.violations:
        raise support.RunError(f"violations: {report.violations}")


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Return its CPU seconds and events per second."""
    with counted_events() as events:
        began = time.process_time()
        work()
        seconds = time.process_time() - began
    return {"seconds": seconds, "events": events[0], "rate": events[0] / seconds}


@contextmanager
def counted_events() -> Iterator[list[int]]:
    """Count the calls that are scheduled on all virtual clocks that run."""
    count, run = [0], Clock.run
    before = WeakKeyDictionary[Clock, int]()

    def counted(clock: Clock, *until: Any, **done: Any) -> None:
        try:
            run(clock, *until, **done)
        finally:
            count[0] += clock.scheduled - before.get(clock, 0)
            before[clock] = clock.scheduled

    with mock.patch.object(Clock, "run", counted):
        yield count


if __name__ == "__main__":
    sys.exit(main())
