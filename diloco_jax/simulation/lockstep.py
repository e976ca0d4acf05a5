"""The decisions of an emulation of equal islands, recorded without its arithmetic.

The protocol decides as in `emulate`, with bodies that note what they are told to do.
Equal islands do the same at the same step, so a recording is one list of acts. Merges
and islands' losses have no part in any decision, so the list is that of every seed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator.holding.store import merges_of
from diloco_jax.coordinator.journal import ALERTS_KEPT
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.island.mailbox import Arrival
from diloco_jax.protocol.holding import Merge
from diloco_jax.protocol.island.boundary import TakeOutcome
from diloco_jax.protocol.messages import DeltaKey, Prepared, Version
from diloco_jax.simulation.bodies import Diary
from diloco_jax.simulation.clock import Clock
from diloco_jax.simulation.coordinator import NoArrays, Received
from diloco_jax.simulation.emulate import Attendance, world_of
from diloco_jax.simulation.emulation_options import EmulationOptions
from diloco_jax.simulation.island import VirtualFetch

REMEDY = "the laboratory is for equal islands in lockstep: use emulate"

Kind = Literal["train", "take", "adopt", "judge", "merge", "commit"]


class Act(NamedTuple):
    """One thing that all islands do, or the coordinator."""

    kind: Kind
    fragment: int = -1
    detail: Any = None
    """Version and `keep` of an adoption, outcome of a judgement."""
    own: Any = None
    """Of a step: positions, int [M, B], and learning rates, float [M]. Of a merge: the
    order. Of a commit: (virtual seconds, tokens)."""


class TapedBody:
    """A body that notes what an island does, and computes nothing."""

    def __init__(self, tape: Lockstep, diary: Diary, clock: Clock) -> None:
        self._tape, self._diary, self._clock = tape, diary, clock

    def begin(self, fetched: Mapping[int, VirtualFetch]) -> None:
        self._diary.bytes_join += sum(part.nbytes for part in fetched.values())

    def arrival(self, fragment: int, fetched: VirtualFetch) -> Arrival:
        self._diary.bytes_down += fetched.nbytes
        return Arrival(fragment=fragment, version=fetched.version)

    def train(self, positions: np.ndarray, learning_rate: float) -> None:
        self._diary.rows.append(
            [self._clock.now, math.nan, learning_rate, math.nan, 0.0, 0.0]
        )
        self._note(Act("train", own=(positions, learning_rate)))

    def take(self, fragment: int) -> int:
        """Return the number of the take."""
        self._diary.takes.append([fragment, self._clock.now, math.nan])
        self._diary.bytes_up += self._tape.bytes_up[fragment]
        self._note(Act("take", fragment))
        return len(self._diary.takes)

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        fragment, number = arrival.fragment, arrival.version.number
        self._diary.adoptions.append((fragment, number, self._clock.now))
        self._note(Act("adopt", fragment, (number, keep)))

    def judge(self, fragment: int, outcome: TakeOutcome) -> None:
        self._note(Act("judge", fragment, outcome))

    def _note(self, act: Act) -> None:
        self._tape.note(self._diary.island, act)


class Lockstep(NoArrays):
    """A recorded emulation; `acts` are what happens in it, in order.

    Raises ConfigError if the islands do not do the same.
    """

    def __init__(
        self, config: Config, options: EmulationOptions, plan: FragmentPlan
    ) -> None:
        layouts = merges_of(config.run, plan)
        self.bytes_up = tuple(merge.layout_up.total_bytes for merge in layouts)
        super().__init__(
            tuple(merge.layout_down.total_bytes for merge in layouts),
            tuple(4 * size for size in plan.sizes),
        )
        self._names = sorted(config.islands)
        self._noted: dict[str, list[tuple[int, Act]]] = {n: [] for n in self._names}
        self._coordinators: list[tuple[int, Act]] = []
        self._count = 0
        self._computed: dict[int, Merge] = {}
        self.alerts: deque[str] = deque(maxlen=ALERTS_KEPT)
        self.world = world_of(
            config, options, plan.sizes, self, self._make_body, self.alerts.append
        )
        self.attendance = Attendance(config, options, self.world, self.bytes_up)
        self.world.run()
        self.attendance.close()
        self.acts = self._in_order()

    def note(self, island: str, act: Act) -> None:
        """Note what an island does."""
        self._count += 1
        self._noted[island].append((self._count, act))

    # ---- as the coordinator's arrays ------------------------------------------------

    def receive(self, key: DeltaKey, encoded: int) -> Received:
        diary = self.attendance.diaries[key.island][key.incarnation - 1]
        diary.delivered(key.fragment, self.world.clock.now)
        return Received(encoded)

    def compute(self, merge: Merge, deltas: Sequence[int]) -> Prepared:
        names = [c.island for c in merge.contributions]
        if names != self._names or len(set(deltas)) > 1:
            raise ConfigError(
                f"at {self.world.clock.now:g} s fragment {merge.fragment} is merged "
                f"from deltas of {', '.join(names)}, and the islands are "
                f"{', '.join(self._names)} (sync.quorum and sync.grace say who is "
                f"waited for); {REMEDY}"
            )
        self._computed[merge.fragment] = merge
        self._note_own(Act("merge", merge.fragment, own=merge))
        return super().compute(merge, deltas)

    def commit(self, fragment: int, version: Version) -> None:
        merge = self._computed.pop(fragment)
        tokens = self.world.coordinator.state.progress_tokens
        when = (self.world.clock.now, tokens)
        self._note_own(Act("commit", fragment, merge, when))

    def _note_own(self, act: Act) -> None:
        self._count += 1
        self._coordinators.append((self._count, act))

    def _make_body(self, name: str) -> TapedBody:
        return TapedBody(self, self.attendance.diaries[name][-1], self.world.clock)

    # ---- one list -------------------------------------------------------------------

    def _in_order(self) -> list[Act]:
        """Return what all did. What islands do stands where the last of them does it:
        behind whatever it needs, and before whatever needs all of it."""
        first, *others = self._names
        found = list(self._coordinators)
        rows = [self._noted[name] for name in self._names]
        for number in range(max(map(len, rows))):
            here = [row[number][1] if number < len(row) else None for row in rows]
            said = [act and act[:3] for act in here]
            for name, other in zip(others, said[1:], strict=True):
                if other != said[0]:
                    raise ConfigError(
                        f"act {number} of islands.{first} is {said[0]}, that of "
                        f"islands.{name} is {other}; {REMEDY}"
                    )
            acts = [act for act in here if act is not None]
            act = acts[0]
            if act.kind == "train":
                positions, rates = zip(*(each.own for each in acts), strict=True)
                act = act._replace(own=(np.stack(positions), np.array(rates)))
            found.append((max(row[number][0] for row in rows), act))
        return [act for _, act in sorted(found, key=lambda item: item[0])]
