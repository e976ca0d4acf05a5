"""A run's islands as of the newest line about each, and the list of its failures.

A failure is told with who, when, why as far as the coordinator knows, and the cost. All
of it stands on the tape.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from diloco_jax.hardware.tpus import peak_flops_per_s

AXES = ("mesh_data", "mesh_fsdp", "mesh_expert", "mesh_tensor")


@dataclasses.dataclass(kw_only=True)
class Lane:
    """One island as of the newest line about it, summed over nothing."""

    name: str
    row: int
    state: str = ""
    """One of `timeline.STATES`; empty: it is not in the run."""
    since: float = 0.0
    """Time up to which its states are in the grid."""
    gap: float = 0.0
    """Time at which the coordinator last heard of it before it was away itself."""
    incarnation: int = 0
    tokens_per_step: int = 0
    median_step_seconds: float = 0.0
    device: str = ""
    stands_for: str = ""
    peak_flops_per_s: float = 0.0
    """Sum over all its devices; 0 if the tables of `diloco plan` do not know them."""
    steps: int = 0
    told: float = 0.0
    """Time of its last line of metrics."""
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    adopted: dict[int, int] = dataclasses.field(default_factory=dict)
    """Version by fragment."""
    out: dict[int, int] = dataclasses.field(default_factory=dict)
    """Tick by fragment of takes without a verdict."""
    out_since: float = 0.0

    def hello(self, line: Mapping[str, Any]) -> None:
        """Take what an incarnation says of its devices."""
        config = line["config"]
        self.device = str(line["environment"].get("device_kind", ""))
        self.stands_for = str(config.get("stands_for", ""))
        devices = math.prod(int(config.get(axis, 1)) for axis in AXES)
        self.peak_flops_per_s = devices * (peak_flops_per_s(self.device) or 0.0)


COORDINATOR = "coordinator"
KEPT = 1_000
ENDS = {
    "died": "its process ended without a word: killed, crashed, or its machine is gone",
    "preempted": "its machine was taken away",
    "failed": "its process ended with an error",
    "refused": "it was put out",
}
"""Ends of an incarnation that are failures, by the reason on the tape."""
BROKE = {
    "disconnected": "its connection broke",
    "silent": "nothing was heard of it for a time budget",
}


@dataclasses.dataclass(kw_only=True)
class ShownFailure:
    """One failure. Tokens of takes count once for each fragment."""

    who: str
    """An island, or "coordinator"."""
    incarnation: int
    began: float
    why: str
    ended: float | None = None
    """When it did steps again; None: it has not."""
    replaced: bool = False
    """True if its process ended: only the next one's steps end it."""
    quarantine: bool = False
    """True if only a release ends it."""
    lost_tokens: float = 0.0
    idle_tokens: float = 0.0
    """Tokens that it would have computed meanwhile."""
    without: int = 0
    """Merges meanwhile, without it."""
    merged: float | None = None
    """Time of the first merge after it: with the island, or of the coordinator."""


class Failures:
    """All failures so far, the newest `KEPT`. Lines come in the order of time."""

    def __init__(self) -> None:
        self._all: deque[ShownFailure] = deque(maxlen=KEPT)
        self._open: dict[str, ShownFailure] = {}
        self._unmerged: dict[str, ShownFailure] = {}
        """The newest failure of each, until it is merged again."""

    def within(self, start: float, stop: float) -> Iterator[ShownFailure]:
        """Yield what failed in [start, stop), the newest first."""
        for failure in reversed(self._all):
            if failure.began < stop and (failure.ended or stop) >= start:
                yield failure

    def absent(self, lane: Lane, why: str, time: float) -> None:
        """Note that an island's connection broke, or that it fell silent."""
        began = min(lane.told or time, time) if why == "silent" else time
        self._begin(lane, began, BROKE.get(why, why))

    def left(self, line: Mapping[str, Any], lane: Lane, time: float) -> None:
        """Note the end of an incarnation, with what it cost."""
        failure = self._open.get(lane.name)
        if failure is None or failure.incarnation != line["incarnation"]:
            if line["reason"] not in ENDS:
                return
            # Its successor may say hello before anybody has noticed.
            failure = self._begin(lane, min(lane.told or time, time), "")
            failure.incarnation = line["incarnation"]
        failure.lost_tokens += sum(line["lost_tokens_by_fragment"])
        failure.replaced = True
        said = f": {line['said']}" if line["said"] else ""
        failure.why = ENDS.get(line["reason"], failure.why) + said

    def resumed(self, lane: Lane, time: float) -> None:
        """Note that an incarnation that was away is heard again."""
        failure = self._open.get(lane.name)
        if failure is not None and not failure.replaced:
            failure.why += "; the same process is back"
            self._end(failure, time)

    def quarantined(self, line: Mapping[str, Any], lane: Lane, time: float) -> None:
        """Note that an island's deltas are not merged any more."""
        failure = self._begin(lane, time, "")
        failure.why = (
            f"quarantine: {line['refused']} of its deltas in a row were not finite or "
            f"too long"
        )
        failure.quarantine = True

    def released(self, lane: Lane, time: float) -> None:
        """Note that they are merged again."""
        if (failure := self._open.get(lane.name)) is not None:
            self._end(failure, time)

    def reported(self, lane: Lane, steps: int, phase: str, time: float) -> None:
        """Take a line of metrics, with the steps since `lane.told`."""
        failure = self._open.get(lane.name)
        if failure is None or failure.quarantine or steps <= 0:
            return
        newer = lane.incarnation > failure.incarnation
        if newer if failure.replaced else phase == "training":
            first = time - steps * lane.median_step_seconds if newer else time
            self._end(failure, max(failure.began, first), lane)

    def merged(self, islands: Mapping[str, int], time: float) -> None:
        """Take a merge of these islands."""
        for name, failure in list(self._unmerged.items()):
            there = name in islands or name == COORDINATOR
            if there and failure.ended is not None:
                failure.merged = time
                del self._unmerged[name]
            elif not there:
                failure.without += 1

    def over(self) -> None:
        """Note the end of the run: nobody is awaited any more."""
        self._open.clear()
        self._unmerged.clear()

    def recovered(self, line: Mapping[str, Any], since: float, time: float) -> None:
        """Note that the coordinator came back, and was away since then."""
        why = "it had lost its state: a new term began with anchors of islands"
        if line["kind"] == "recovered":
            why = (
                f"its process ended: killed, crashed or stopped; it came back from "
                f"snapshot {line['snapshot']} and {line['records']:,} records of its "
                f"log"
            )
        failure = ShownFailure(
            who=COORDINATOR, incarnation=0, began=since, why=why, ended=time
        )
        self._all.append(failure)
        self._unmerged[COORDINATOR] = failure

    def _begin(self, lane: Lane, began: float, why: str) -> ShownFailure:
        before = self._open.get(lane.name)
        if before is not None and before.incarnation == lane.incarnation:
            return before
        if before is not None:
            before.ended = began
        failure = ShownFailure(
            who=lane.name, incarnation=lane.incarnation, began=began, why=why
        )
        self._all.append(failure)
        self._open[lane.name] = self._unmerged[lane.name] = failure
        return failure

    def _end(
        self, failure: ShownFailure, time: float, idle: Lane | None = None
    ) -> None:
        """End a failure. idle: the island, which made no steps meanwhile."""
        failure.ended = time
        if self._open.get(failure.who) is failure:
            del self._open[failure.who]
        if idle is not None and idle.median_step_seconds:
            speed = idle.tokens_per_step / idle.median_step_seconds
            failure.idle_tokens = (time - failure.began) * speed
