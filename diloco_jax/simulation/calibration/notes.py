"""On what of a prediction the recorded run says little."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from diloco_jax.config import Config
from diloco_jax.faults import COORDINATOR, parse_faults
from diloco_jax.simulation.calibration.fit import Calibration, Fitted
from diloco_jax.simulation.calibration.observed import Timeline

COLD = 2.0
"""First joins that take so many times what others do have compiled what these found in
the cache."""


def notes_on(
    timeline: Timeline,
    calibration: Calibration,
    config: Config,
    against: Timeline | None,
) -> Iterator[str]:
    """One sentence for each thing that wall time and participation of the predicted run
    rest on, and that the timeline has not seen."""
    faults = parse_faults(config.placement.faults, config.islands)
    killed = {fault.who for fault in faults.faults if fault.pause_s is None}
    if COORDINATOR in killed:
        numbers = {
            "its outage": calibration.outage_s,
            "the return to it": calibration.resume_s,
            "its compiling": calibration.recompiled_s,
        }
        yield from _of_guesses(timeline, "coordinator@MERGE:kill", numbers)
    if killed - {COORDINATOR}:
        numbers = {
            "its start": calibration.restart_s,
            "its join": calibration.rejoin_s[""],
        }
        yield from _of_guesses(timeline, "NAME@STEP:kill", numbers)
    yield from _of_the_cache(timeline, against)


def _of_guesses(
    timeline: Timeline, fault: str, numbers: Mapping[str, Fitted]
) -> Iterator[str]:
    guesses = [
        f"{what} {one.value:.1f} s" for what, one in numbers.items() if not one.observed
    ]
    if guesses:
        yield (
            f"the predicted run has {fault} among its faults, and what follows was not "
            f"observed in {timeline.workdir}: guessed are {', '.join(guesses)}; "
            f"calibrate on a run with such a fault"
        )


def _of_the_cache(timeline: Timeline, against: Timeline | None) -> Iterator[str]:
    if against is timeline:
        return
    there = f"first joins in {against.workdir}" if against else "later ones"
    own = timeline.first_joins()
    others = against.first_joins() if against else timeline.later_joins()
    if not (own and others):
        return
    first, other = statistics.median(own), statistics.median(others)
    low, high = sorted((first, other))
    if high > COLD * low:
        yield (
            f"first joins in {timeline.workdir} took {first:.1f} s, {there} "
            f"{other:.1f} s: with another state of the compilation cache. Predicted "
            f"are those of {timeline.workdir}, which wall time, uptime and "
            f"participation rest on; calibrate on a run that began with such a cache"
        )
