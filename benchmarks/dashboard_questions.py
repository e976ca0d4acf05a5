"""Ten questions about a run under chaos: answered from the dashboard's page alone, and
from the list of faults.

Times are seconds from the beginning of the run, as the page shows them.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

COORDINATOR, DASH = "coordinator", "\N{EN DASH}"
WITHIN_S = 3.0
"""Seconds by which a time that the page says may be off: islands report every second or
two, and are back at the end of a first step."""
TOKENS_WITHIN = 0.05
DRAWN = (
    *(2 * ("why, kill",)),
    *(2 * ("merged again, kill",)),
    "for how long, no coordinator",
)
"""Kinds of questions about one fault, of which one each is drawn."""
WHY = "process ended"
"""Words that the page must have for the reason of a kill."""


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

    all: tuple[Fault, ...]
    """In order."""
    tokens_lost: Mapping[str, int]
    """By island."""

    @property
    def kills(self) -> list[Fault]:
        """The kills, in order: a stop is shorter than the time budget, after which the
        page lists it."""
        return [fault for fault in self.all if fault.kind == "kill"]


class Row(NamedTuple):
    """A row of the page's table of failures."""

    when_s: float
    who: str
    seconds: float | None
    """None: it goes on."""
    why: str
    cost: str

    def merged_again_s(self) -> float | None:
        """Return the seconds after which it was merged again; None if no cell says."""
        told = re.search(r"merged again ([\d.:]+)", self.cost)
        return _seconds(told[1]) if told else None

    def tokens_lost(self) -> float:
        """Return its tokens lost."""
        told = re.search(r"([\d,]+) tokens lost", self.cost)
        return _count(told[1]) if told else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """Answers that a reader of the page finds in its tables."""

    failures: tuple[Row, ...]
    """In order."""
    islands: Mapping[str, Mapping[str, str]]
    """Row by island, cell by head."""

    def ended(self) -> list[Row]:
        """Return the failures of processes that ended, in order."""
        return [row for row in self.failures if WHY in row.why]

    def ended_at(self, place: int) -> tuple[str, float] | None:
        """Return whose process ended, and when, at a place of `ended`."""
        found = self.ended()
        return (found[place].who, found[place].when_s) if found else None

    def row_of(self, fault: Fault) -> Row | None:
        """Return the failure that a reader finds at a fault's name and time."""
        near = [row for row in self.failures if row.who == fault.who]
        near.sort(key=lambda row: abs(row.when_s - fault.at_s))
        return near[0] if near and _near(near[0].when_s, fault.at_s) else None

    def tokens_lost(self, island: str) -> float:
        """Return the tokens that an island lost, by its row."""
        return _count(self.islands[island]["tokens lost"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question, with the list's answer, how the page's is found, and when both
    agree."""

    kind: str
    text: str
    of_page: Callable[[Page], Any]
    answer: Any
    agree: Callable[[Any, Any], bool]

    def is_answered(self, page: Page) -> bool:
        """Tell if the page says what the list does."""
        return bool(self.agree(self.of_page(page), self.answer))


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
    ordered = sorted(faults, key=lambda fault: fault.at_s)
    return Truth(all=tuple(ordered), tokens_lost=tokens_lost)


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
        failures=tuple(sorted(rows, key=lambda row: row.when_s)),
        islands={
            body[0].partition(" ")[0]: dict(zip(head, body, strict=True))
            for body in bodies
        },
    )


def questions(truth: Truth, seed: int) -> list[Question]:
    """Return ten questions: four about the whole run, five about faults and one about
    tokens that are drawn by the seed.

    Raises ValueError if there is no fault of some kind to ask for."""
    numbers = random.Random(seed)
    asked = [
        [one for fault in truth.kills for one in about(fault) if one.kind == kind]
        for kind in DRAWN
    ]
    if not all(asked):
        lacking = [kind for kind, found in zip(DRAWN, asked, strict=True) if not found]
        raise ValueError(
            f"the list has no fault for the questions {', '.join(lacking)}; give "
            f"another seed"
        )
    return [
        Question(
            kind="first end",
            text="Whose process ended first, and when?",
            of_page=lambda page: page.ended_at(0),
            answer=(truth.kills[0].who, truth.kills[0].at_s),
            agree=_same_who_and_time,
        ),
        Question(
            kind="last end",
            text="Whose process ended last, and when?",
            of_page=lambda page: page.ended_at(-1),
            answer=(truth.kills[-1].who, truth.kills[-1].at_s),
            agree=_same_who_and_time,
        ),
        Question(
            kind="most ends",
            text="Whose process ended most often?",
            of_page=lambda page: _most(row.who for row in page.ended()),
            answer=_most(fault.who for fault in truth.kills),
            agree=operator.eq,
        ),
        Question(
            kind="ends of the coordinator",
            text="How often did the coordinator's process end?",
            of_page=lambda page: sum(r.who == COORDINATOR for r in page.ended()),
            answer=sum(fault.who == COORDINATOR for fault in truth.kills),
            agree=operator.eq,
        ),
        *map(numbers.choice, asked),
        numbers.choice(list(of_tokens(truth))),
    ]


def of_tokens(truth: Truth) -> Iterator[Question]:
    """Yield what is asked of the tokens that each island lost: told in its row of the
    islands, and failure by failure."""
    for name, lost in sorted(truth.tokens_lost.items()):
        yield from _of_tokens_of(name, lost)


def _of_tokens_of(name: str, lost: int) -> Iterator[Question]:
    yield Question(
        kind="tokens lost, in all",
        text=f"How many tokens did {name} lose?",
        of_page=lambda page: page.tokens_lost(name),
        answer=lost,
        agree=_about,
    )
    yield Question(
        kind="tokens lost, by row",
        text=f"How many tokens did the failures of {name} cost together?",
        of_page=lambda page: sum(
            row.tokens_lost() for row in page.failures if row.who == name
        ),
        answer=lost,
        agree=_about,
    )


def about(fault: Fault) -> Iterator[Question]:
    """Yield what is asked of one fault, as far as the list knows the answer."""
    at = f"{fault.at_s:.0f} s"
    coordinator = fault.who == COORDINATOR

    def of_row(read: Callable[[Row], Any]) -> Callable[[Page], Any]:
        return lambda page: read(row) if (row := page.row_of(fault)) else None

    yield Question(
        kind=f"why, {fault.kind}",
        text=f"Why did {fault.who} fail at {at}?",
        of_page=of_row(lambda row: row.why),
        answer=WHY,
        agree=lambda page, listed: page is not None and listed in page,
    )
    if coordinator and fault.back_s is not None:
        yield Question(
            kind="for how long, no coordinator",
            text=f"For how long was there no coordinator from {at} on?",
            of_page=of_row(lambda row: row.seconds),
            answer=fault.back_s,
            agree=_near,
        )
    elif not coordinator and fault.merged_s is not None:
        yield Question(
            kind="merged again, kill",
            text=f"How long after {at} was {fault.who} merged again?",
            of_page=of_row(lambda row: row.merged_again_s()),
            answer=fault.merged_s,
            agree=_near,
        )


def unexplained(page: Page, truth: Truth) -> list[Row]:
    """Return the page's failures that begin within seconds of no fault there."""
    return [
        row
        for row in page.failures
        if not any(row.who == f.who and _near(row.when_s, f.at_s) for f in truth.all)
    ]


def _same_who_and_time(
    page: tuple[str, float] | None, truth: tuple[str, float]
) -> bool:
    return page is not None and page[0] == truth[0] and _near(page[1], truth[1])


def _near(page: float | None, truth: float | None) -> bool:
    return page is not None and truth is not None and abs(page - truth) <= WITHIN_S


def _about(page: float, listed: float) -> bool:
    return abs(page - listed) <= TOKENS_WITHIN * listed


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
