"""The cases of the fault matrix: what is struck from a moment on, as data."""

from __future__ import annotations

import dataclasses

from diloco_jax.chaos.schedule import Strike, divided, parse_strikes
from diloco_jax.faults import COORDINATOR, parse_faults

ISLANDS, FRAGMENTS = ("a", "b", "c"), 2
PHASES = ("idle", "transfer", "merge")
"""Between two takes; while a delta is on its way; while the coordinator merges."""
AT_A_STEP = "at a step"
"""In the place of a phase, for faults of an island's parameters."""
LEASE_S = 4.0
SHORT, LONG = "1.5", "6"
"""Seconds within a lease, and beyond it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A name for people, and strikes whose times count from the moment, or faults at a
    step."""

    name: str
    texts: tuple[str, ...]

    @property
    def strikes(self) -> tuple[Strike, ...]:
        """The strikes, by time."""
        return parse_strikes(divided(self.texts)[0], ISLANDS)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases in which it strikes."""
        return PHASES if self.strikes else (AT_A_STEP,)

    @property
    def spoiled(self) -> tuple[str, ...]:
        """The islands whose parameters are changed."""
        faults = parse_faults(divided(self.texts)[1], ISLANDS).faults
        return tuple(fault.who for fault in faults if fault.factor is not None)

    def struck(self, *kinds: str) -> tuple[str, ...]:
        """Return the islands whose process, or link, is struck in one of these
        ways."""
        names = {
            name
            for strike in self.strikes
            if strike.kind in kinds
            for name in (strike.links(ISLANDS) if strike.of_network else strike.who)
        }
        return tuple(name for name in ISLANDS if name in names)

    @property
    def victim(self) -> str:
        """The island whose transfer is struck."""
        who = self.strikes[0].who if self.strikes else self.spoiled
        return next((name for name in who if name != COORDINATOR), ISLANDS[0])


CASES = (
    Case("an island is killed", ("a@0s:kill",)),
    Case("two islands of a site are killed", ("a+b@0s:kill",)),
    Case("all islands are killed", ("a+b+c@0s:kill",)),
    Case("the coordinator is killed", ("coordinator@0s:kill",)),
    Case("an island and the coordinator are killed", ("a+coordinator@0s:kill",)),
    Case("everything is killed", ("a+b+c+coordinator@0s:kill",)),
    Case("an island is killed twice", ("a@0s:kill", "a@3s:kill")),
    Case(
        "the coordinator is killed twice",
        ("coordinator@0s:kill", "coordinator@1.5s:kill"),
    ),
    Case("one island after another is killed", ("a@0s:kill", "b@1s:kill")),
    Case(
        "an island is killed, then the coordinator",
        ("a@0s:kill", "coordinator@0.5s:kill"),
    ),
    Case(
        "the coordinator is killed, then an island",
        ("coordinator@0s:kill", "a@0.5s:kill"),
    ),
    Case("an island stops within its lease", (f"a@0s:stop{SHORT}",)),
    Case("an island stops beyond its lease", (f"a@0s:stop{LONG}",)),
    Case("two islands of a site stop", (f"a+b@0s:stop{LONG}",)),
    Case("all islands stop", (f"a+b+c@0s:stop{SHORT}",)),
    Case("the coordinator stops for a moment", (f"coordinator@0s:stop{SHORT}",)),
    Case("the coordinator stops beyond all leases", (f"coordinator@0s:stop{LONG}",)),
    Case("an island and the coordinator stop", (f"a+coordinator@0s:stop{LONG}",)),
    Case("an island is slow", ("a@0s:slow5=0.5",)),
    Case("the coordinator is slow", ("coordinator@0s:slow5=0.5",)),
    Case("an island is cut off within its lease", (f"a@0s:partition{SHORT}",)),
    Case("an island is cut off beyond its lease", (f"a@0s:partition{LONG}",)),
    Case("nothing comes from an island", (f"a@0s:partition-up{LONG}",)),
    Case("nothing comes from an island for a moment", (f"a@0s:partition-up{SHORT}",)),
    Case("nothing comes to an island", (f"a@0s:partition-down{LONG}",)),
    Case("nothing comes to an island for a moment", (f"a@0s:partition-down{SHORT}",)),
    Case("two islands of a site are cut off", (f"a+b@0s:partition{LONG}",)),
    Case("all are cut off for a moment", (f"coordinator@0s:partition{SHORT}",)),
    Case("all are cut off", (f"coordinator@0s:partition{LONG}",)),
    Case("nothing comes from any island", (f"coordinator@0s:partition-up{LONG}",)),
    Case("nothing comes to any island", (f"coordinator@0s:partition-down{LONG}",)),
    Case("the link of an island is slow", ("a@0s:throttle5=8000",)),
    Case("all links are slow", ("coordinator@0s:throttle5=8000",)),
    Case("the link of an island is late", ("a@0s:delay5=0.5",)),
    Case("all links are late", ("coordinator@0s:delay5=0.5",)),
    Case("the link of an island corrupts", ("a@0s:corrupt3",)),
    Case("all links corrupt", ("coordinator@0s:corrupt3",)),
    Case(
        "an island is cut off, and the coordinator killed",
        (f"a@0s:partition{LONG}", "coordinator@1s:kill"),
    ),
    Case(
        "an island stops, and the coordinator is killed",
        (f"a@0s:stop{LONG}", "coordinator@1s:kill"),
    ),
    Case(
        "an island is killed, and another cut off",
        ("a@0s:kill", "b@0.5s:partition3"),
    ),
    Case(
        "all are cut off, and an island is killed",
        ("coordinator@0s:partition3", "a@1s:kill"),
    ),
    Case("the parameters of an island become NaN", ("a@40:nan",)),
    Case("an island sends what is a hundred times too long", ("a@40:scale100",)),
)
CELLS = sum(len(case.phases) for case in CASES)
"""Number of all cells: a case in a phase."""
