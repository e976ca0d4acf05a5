"""Ten questions about a run under chaos: answered from the dashboard's page alone, and
from the list of faults.

Times are seconds from the beginning of the run, as the page shows them.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

COORDINATOR, DASH = "coordinator", "\N{EN DASH}"
SEEN_S = 4.0
"""Shortest stop that is asked for: shorter ones are within the usual time between two
signs of life."""
WITHIN_S = 3.0
"""Seconds by which a time that the page says may be off: islands report every second or
two, and are back at the end of a first step."""
TOKENS_WITHIN = 0.05
WHY = {"kill": "process ended", "stop": "stood still"}
"""Words that the page must have for the reason of each kind of fault."""


class Fault(NamedTuple):
    """A fault of the list. Of seconds after its beginning, None: not before the next
    fault there."""

    who: str
    kind: str
    at_s: float
    seconds: float
    """Its duration; 0 of a kill."""
    back_s: float | None
    merged_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Truth:
    """The list of faults, and the books of the run."""

    faults: tuple[Fault, ...]
    """In order, those alone that anybody could see."""
    tokens_lost: Mapping[str, int]
    """By island."""

    def kills(self) -> list[Fault]:
        """Return the kills, in order."""
        return [fault for fault in self.faults if fault.kind == "kill"]


class Row(NamedTuple):
    """A row of the page's table of failures."""

    when_s: float
    who: str
    seconds: float | None
    """None: it goes on."""
    why: str
    cost: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """What a reader of the page finds in its tables."""

    failures: tuple[Row, ...]
    """In order."""
    islands: Mapping[str, Mapping[str, str]]
    """Row by island, cell by head."""

    def ended(self) -> list[Row]:
        """Return the failures of processes that ended, in order."""
        return [row for row in self.failures if WHY["kill"] in row.why]

    def ended_at(self, place: int) -> tuple[str, float] | None:
        """Return whose process ended, and when, at a place of `ended`."""
        found = self.ended()
        return (found[place].who, found[place].when_s) if found else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question, with how either side answers it and when both agree."""

    text: str
    of_page: Callable[[Page], Any]
    of_list: Callable[[Truth], Any]
    agree: Callable[[Any, Any], bool]


def truth_of(
    outcomes: Sequence[Mapping[str, Any]],
    tokens_lost: Mapping[str, int],
    begun_unix: float,
) -> Truth:
    """Return the list of faults, out of the report of `diloco chaos`."""
    faults = [
        Fault(
            who=one["who"],
            kind=one["kind"],
            at_s=one["time"] - begun_unix,
            seconds=one["seconds"],
            back_s=one["back_s"],
            merged_s=one["merged_s"],
        )
        for one in outcomes
    ]
    seen = [f for f in faults if f.kind == "kill" or f.seconds >= SEEN_S]
    ordered = sorted(seen, key=lambda fault: fault.at_s)
    return Truth(faults=tuple(ordered), tokens_lost=tokens_lost)


def page_of(
    failures: Sequence[Sequence[str]], islands: Sequence[Sequence[str]]
) -> Page:
    """Return what the texts of two tables say. islands: the first row is the head."""
    rows = [
        Row(_seconds(when), who, _lasted(lasted), why, cost)
        for when, who, lasted, why, cost in failures
    ]
    head, *bodies = islands
    return Page(
        failures=tuple(sorted(rows)),
        islands={
            body[0].partition(" ")[0]: dict(zip(head, body, strict=True))
            for body in bodies
        },
    )


def questions(truth: Truth, seed: int) -> list[Question]:
    """Return ten questions; those about one fault are about faults drawn by the seed.

    Raises ValueError if there is no fault of some kind to ask for."""
    numbers = random.Random(seed)
    kinds = [("kill", True), ("stop", True), ("kill", False)]
    found = [_of(truth, kind, of_islands=islands) for kind, islands in kinds]
    if not all(found):
        raise ValueError("the list lacks kills or stops to ask for; give another seed")
    killed, stopped, down = map(numbers.choice, found)
    loser = numbers.choice(sorted(truth.tokens_lost))

    def row(page: Page, fault: Fault) -> Row | None:
        near = [r for r in page.failures if r.who == fault.who]
        near.sort(key=lambda r: abs(r.when_s - fault.at_s))
        return near[0] if near and _near(near[0].when_s, fault.at_s) else None

    def merged(page: Page) -> float | None:
        found = row(page, killed)
        told = re.search(r"merged again ([\d.:]+)", found.cost) if found else None
        return _seconds(told[1]) if told else None

    def lasted(fault: Fault) -> Callable[[Page], float | None]:
        return lambda page: found.seconds if (found := row(page, fault)) else None

    def reason(fault: Fault) -> Callable[[Page], str]:
        return lambda page: found.why if (found := row(page, fault)) else ""

    return [
        Question(
            text="Whose process ended first, and when?",
            of_page=lambda page: page.ended_at(0),
            of_list=lambda truth: (truth.kills()[0].who, truth.kills()[0].at_s),
            agree=_same_who_and_time,
        ),
        Question(
            text="Whose process ended last, and when?",
            of_page=lambda page: page.ended_at(-1),
            of_list=lambda truth: (truth.kills()[-1].who, truth.kills()[-1].at_s),
            agree=_same_who_and_time,
        ),
        Question(
            text="Whose process ended most often?",
            of_page=lambda page: _most(row.who for row in page.ended()),
            of_list=lambda truth: _most(fault.who for fault in truth.kills()),
            agree=lambda page, truth: page == truth,
        ),
        Question(
            text="How often did the coordinator's process end?",
            of_page=lambda page: sum(r.who == COORDINATOR for r in page.ended()),
            of_list=lambda truth: len(_of(truth, "kill", of_islands=False)),
            agree=lambda page, truth: page == truth,
        ),
        Question(
            text=f"Why did {killed.who} fail at {killed.at_s:.0f} s?",
            of_page=reason(killed),
            of_list=lambda truth: WHY[killed.kind],
            agree=lambda page, truth: truth in page,
        ),
        Question(
            text=f"When was {killed.who} merged again after {killed.at_s:.0f} s?",
            of_page=merged,
            of_list=lambda truth: killed.merged_s,
            agree=_near,
        ),
        Question(
            text=f"Why did {stopped.who} fail at {stopped.at_s:.0f} s?",
            of_page=reason(stopped),
            of_list=lambda truth: WHY[stopped.kind],
            agree=lambda page, truth: truth in page,
        ),
        Question(
            text=f"For how long, at {stopped.at_s:.0f} s?",
            of_page=lasted(stopped),
            of_list=lambda truth: stopped.seconds,
            agree=_near,
        ),
        Question(
            text=f"For how long was there no coordinator from {down.at_s:.0f} s on?",
            of_page=lasted(down),
            of_list=lambda truth: down.back_s,
            agree=_near,
        ),
        Question(
            text=f"How many tokens did {loser} lose?",
            of_page=lambda page: _count(page.islands[loser]["tokens lost"]),
            of_list=lambda truth: truth.tokens_lost[loser],
            agree=lambda page, truth: abs(page - truth) <= TOKENS_WITHIN * truth,
        ),
    ]


def _of(truth: Truth, kind: str, *, of_islands: bool) -> list[Fault]:
    """Return the faults of a kind whose end is known."""
    return [
        fault
        for fault in truth.faults
        if fault.kind == kind
        and (fault.who != COORDINATOR) == of_islands
        and (kind == "stop" or fault.merged_s is not None)
    ]


def _same_who_and_time(
    page: tuple[str, float] | None, truth: tuple[str, float]
) -> bool:
    return page is not None and page[0] == truth[0] and _near(page[1], truth[1])


def _near(page: float | None, truth: float | None) -> bool:
    return page is not None and truth is not None and abs(page - truth) <= WITHIN_S


def _most(names: Any) -> set[str]:
    counts = collections.Counter(names)
    most = max(counts.values(), default=0)
    return {name for name, count in counts.items() if count == most}


def _seconds(text: str) -> float:
    """Parse 1:02:03, 2:03 or 4.5 s."""
    found = 0.0
    for part in text.removesuffix(" s").split(":"):
        found = 60 * found + float(part)
    return found


def _lasted(text: str) -> float | None:
    if text == "until now":
        return None
    return 0.0 if text == DASH else _seconds(text)


def _count(text: str) -> float:
    number, _, unit = text.partition(" ")
    if number == DASH:
        return 0.0
    scale = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}[unit]
    return scale * float(number.replace(",", ""))
