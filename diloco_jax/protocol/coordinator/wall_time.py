"""Bound an island's steps and speed by the coordinator's clock.

An island that lies could otherwise make any number of steps at once, and end the run or
outweigh all others; or call itself fast, idle, and make the others' merges small; or
call itself slow, and make them wait. So each claimed step uses up wall time, and an
island's step time is about that of its claimed steps.
"""

from __future__ import annotations

import math

import msgspec

SHORTEST_STEP_S = 1e-4
"""Shortest step time that is believed of any island, in seconds."""
FASTER = 2.0
"""Claimed steps per wall second that are believed, as a multiple of those of the
shortest believed step: a wrong config must not put out an honest island."""
LATE_S = 1.0
"""Wall time that the first incarnation of an island begins with: messages may come
late."""
NEAR = 2.0
"""Largest ratio between a step time that is believed and the wall time per step of the
latest reports: it is a median, to which stalls and evaluations do not belong."""


class WallTime(msgspec.Struct, frozen=True, kw_only=True):
    """Wall time of an incarnation by the coordinator's clock, in seconds."""

    heard_at: float = 0.0
    """Time of its last hello or report."""
    unused_s: float = LATE_S
    """Wall time that no claimed step has used up."""
    training_s: float = 0.0
    """Wall time in training; it counts for less as it gets older."""
    steps: float = 0.0
    """Steps claimed in that time, which count for less likewise."""
    stepped_at: float = 0.0
    """Time of the last report in training that had more steps; 0: none since it began,
    or was away."""
    stepping_s: float = 0.0
    """Wall time between such reports, which ages only as steps are made: a step may
    take longer than anything is remembered in `training_s`."""
    stepped: float = 0.0
    """Steps in that time, which age likewise."""
    carried: bool = False
    """An incarnation of this name came from an earlier term."""

    @property
    def least_step_s(self) -> float:
        """Shortest step time by the latest claims, in seconds; 0: nothing is known."""
        # One step more may be under way.
        return self.training_s / (NEAR * (self.steps + 1))

    @property
    def most_step_s(self) -> float:
        """Longest step time by the latest claims, in seconds; infinity: nothing is
        known yet, for messages may come late."""
        if self.training_s < LATE_S:
            return math.inf
        shown_s = self.training_s / max(self.steps, 1.0)
        if self.stepped:
            shown_s = max(shown_s, self.stepping_s / self.stepped)
        return NEAR * shown_s

    def next_incarnation(
        self, now: float, most_s: float, under_way_s: float = 0.0
    ) -> WallTime:
        """Return the wall time of the next incarnation, which keeps at most `most_s`
        unused. Its speed is measured on: else a liar would come again before each
        merge. under_way_s: of a step that began unheard."""
        unused_s = min(self.unused_s + now - self.heard_at + under_way_s, most_s)
        return msgspec.structs.replace(
            self, heard_at=now, unused_s=unused_s, stepped_at=0.0
        )

    def unused_at(self, now: float, most_s: float) -> float:
        """Return the unused wall time at the next message, before its claims. most_s:
        that is kept unused, unless there is more already (`claims.unheard`)."""
        return min(self.unused_s + now - self.heard_at, max(self.unused_s, most_s))

    def slept(self, seconds: float) -> WallTime:
        """Return the wall time after seconds that the coordinator's clock lacks."""
        stepped_at = self.stepped_at and self.stepped_at - seconds
        return msgspec.structs.replace(
            self, heard_at=self.heard_at - seconds, stepped_at=stepped_at
        )

    def heard(
        self,
        now: float,
        unused_s: float,
        steps: int,
        shortest_s: float,
        memory_s: float,
    ) -> WallTime:
        """Return the wall time after a message with so many claimed steps, for which
        the unused time is enough. memory_s: age at which time in training counts for
        less than half; 0: the time that has passed was none in training."""
        training_s, made = self.training_s, self.steps
        stepping_s, stepped = self.stepping_s, self.stepped
        if memory_s and steps and self.stepped_at:
            passed_s = now - self.stepped_at
            kept = memory_s / (memory_s + passed_s)
            stepping_s, stepped = stepping_s * kept + passed_s, stepped * kept + steps
        stepped_at = now if steps else self.stepped_at
        if memory_s:
            passed_s = now - self.heard_at
            kept = memory_s / (memory_s + passed_s)
            training_s, made = training_s * kept + passed_s, made * kept + steps
        return msgspec.structs.replace(
            self,
            heard_at=now,
            unused_s=unused_s - steps * shortest_s / FASTER,
            training_s=training_s,
            steps=made,
            stepped_at=stepped_at if memory_s else 0.0,
            stepping_s=stepping_s,
            stepped=stepped,
        )


def is_enough(unused_s: float, steps: int, shortest_s: float) -> bool:
    """Tell whether so many steps may have been made in the unused time."""
    return steps * shortest_s <= FASTER * unused_s
