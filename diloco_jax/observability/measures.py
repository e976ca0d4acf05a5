"""The measures of a run, one formula each, and whether it is healthy, at a glance.

The formulas hold for the runtime and the simulator. Provisioned time runs from an
island's first hello to its goodbye or the end of the run, outages included, without the
first compilation and evaluation. An island's undisturbed speed is its tokens per step
over its median step, into which neither compilation nor evaluation enters. Times are
seconds on one clock.

The mean over a run (`goodput`) hides on its tenth day what happens on it.
`RecentGoodput` is the same ratio over the last hour, from one status after the other:
what was merged in it over what the islands that are in the run would have computed in
it, each at its last known speed.

Health is one word, and what is wrong now, from the coordinator's status or the summary.
Alerts are told once when something begins, so they are no answer to what is wrong now.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandMeasure:
    """The figures of one island over all its incarnations."""

    provisioned_seconds: float
    tokens_per_step: float
    median_step_seconds: float
    """Median seconds of undisturbed steps; 0 if there was none. Both fields are means
    over incarnations, weighted by their steps."""
    computed_tokens: int
    merged_tokens: int
    active: tuple[tuple[float, float], ...] = ()
    """Intervals (start, end) in which the island made steps."""

    @property
    def undisturbed_tokens(self) -> float:
        """Return the tokens that the island would have computed without any delay."""
        if self.median_step_seconds <= 0:
            return 0.0
        return (
            self.provisioned_seconds * self.tokens_per_step / self.median_step_seconds
        )


def goodput(islands: Iterable[IslandMeasure]) -> float:
    """Return merged tokens over those that undisturbed islands would have computed."""
    islands = tuple(islands)
    return _ratio(
        sum(i.merged_tokens for i in islands),
        sum(i.undisturbed_tokens for i in islands),
    )


def compute_goodput(islands: Iterable[IslandMeasure]) -> float:
    """Return goodput with computed tokens, merged or not, as the paper's table does."""
    islands = tuple(islands)
    return _ratio(
        sum(i.computed_tokens for i in islands),
        sum(i.undisturbed_tokens for i in islands),
    )


def uptime(islands: Iterable[IslandMeasure], wall_seconds: float) -> float:
    """Return the share of the wall time in which at least one island made steps."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(span for island in islands for span in island.active):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return _ratio(covered, wall_seconds)


def participation(merges_in: int, merges_while_alive: int) -> float:
    """Return the share of the merges during an island's life that it was part of."""
    return _ratio(merges_in, merges_while_alive)


def _ratio(part: float, whole: float) -> float:
    """Return part / whole, and 0 for 0 / 0: a run that has not begun has no goodput."""
    return part / whole if whole > 0 else 0.0


WINDOW_S = 3600.0
"""Length of the window."""
SAMPLE_S = 60.0
"""Seconds between two samples that are kept."""


class _Sample(NamedTuple):
    time: float
    merged: int
    undisturbed: float


class RecentGoodput:
    """The goodput of a window that moves with time. Use it from one thread."""

    def __init__(self) -> None:
        self._samples: collections.deque[_Sample] = collections.deque()
        self._last: _Sample | None = None
        self._speeds: dict[str, float] = {}
        """Last known tokens per second of each island in the run."""

    def note(self, status: Mapping[str, Any], now: float) -> None:
        """Take in a status; see `summary.status`. Outside a running run, or as a new
        term begins its books, the window begins anew."""
        merged, last = status["tokens_merged"], self._last
        running = status["phase"] == "running"
        if last is None or merged < last.merged or not running:
            self._samples.clear()
            self._last = _Sample(now, merged, 0.0)
        else:
            per_s = sum(self._speeds.values())
            undisturbed = last.undisturbed + per_s * (now - last.time)
            self._last = _Sample(now, merged, undisturbed)
        # An island that is absent is in the run; one that said goodbye is not.
        self._speeds = {
            name: island["tokens_per_second"] or self._speeds.get(name, 0.0)
            for name, island in status["islands"].items()
            if island["state"] != "gone"
        }
        samples = self._samples
        if not samples or now - samples[-1].time >= SAMPLE_S:
            samples.append(self._last)
        while len(samples) > 1 and samples[1].time <= now - WINDOW_S:
            samples.popleft()

    @property
    def seconds(self) -> float:
        """Seconds in the window so far."""
        if self._last is None:
            return 0.0
        return self._last.time - self._samples[0].time

    @property
    def goodput(self) -> float:
        """Goodput of the window; 1 if no island is known to have had a speed in it."""
        if self._last is None:
            return 1.0
        first, last = self._samples[0], self._last
        undisturbed = last.undisturbed - first.undisturbed
        return (last.merged - first.merged) / undisturbed if undisturbed > 0 else 1.0


AWAY = ("absent", "gone", "restarting", "refused", "failed", "quarantined")
"""States of an island whose work is not merged, though the run goes on."""
ENDING = "ending"
"""Phase of a run that is over, while its coordinator writes what it leaves."""
EVALUATING = "evaluating"
"""Phase of a local run after that, while its loss is computed."""
OVER = ("done", "stopped", ENDING, EVALUATING)
BEGINS = ("joining", "compiling")
"""States of an island before its first step."""
NAMED = 4
"""Most islands that are named for one trouble, and most troubles in a line."""
STYLES = {"healthy": "green", "degraded": "bold yellow", "down": "bold red"}
"""By word; all others are plain."""


def health_of(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` and `why`, a list of sentences, of a status.

    The state is "healthy", or "degraded" with at least one reason: less is merged than
    could be. "down": nothing is merged, since no island trains or the coordinator does
    not answer. "starting": no island has made a step yet. The phases in `OVER` say it
    all.
    """
    if "unreachable" in status:
        return {"state": "down", "why": [str(status["unreachable"])]}
    phase = status.get("phase")
    if phase in OVER:
        return {"state": phase, "why": []}
    if phase == "unreachable":
        return {"state": "down", "why": ["the coordinator does not answer"]}
    islands: Mapping[str, Mapping[str, Any]] = status.get("islands", {})
    states = [str(island.get("state", "")) for island in islands.values()]
    why = list(_wrong(status))
    if phase == "flushing" or "training" in states:
        return {"state": "degraded" if why else "healthy", "why": why}
    if any(state in BEGINS for state in states) or not any(s in AWAY for s in states):
        return {"state": "degraded" if why else "starting", "why": why}
    return {"state": "down", "why": ["no island trains", *why]}


def health_text(health: Mapping[str, Any]) -> str:
    """Return a health as one line."""
    why, more = health["why"][:NAMED], len(health["why"]) - NAMED
    told = "; ".join([*why, *([f"and {more} more"] if more > 0 else [])])
    return ": ".join(filter(None, (health["state"], told)))


def _wrong(status: Mapping[str, Any]) -> Iterator[str]:
    if status.get("phase") == "gathering":
        yield "the coordinator has lost its state, and gathers anchors of islands"
    islands = status.get("islands", {})
    by_state: dict[str, list[str]] = {}
    for name, island in islands.items():
        state = str(island.get("state", ""))
        loss = island.get("loss", 0.0)
        # The loss of a step is known at the end of the next one.
        if state == "training" and island.get("steps", 0) > 1 and not _finite(loss):
            state = "without a finite loss"
        by_state.setdefault(state, []).append(name)
    ends = status.get("phase") == "flushing"
    for state in (*AWAY, "without a finite loss"):
        if (names := by_state.get(state)) and not (ends and state == "gone"):
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            yield f"{', '.join(names[:NAMED])}{more} {state}"
    yield from status.get("wrong", ())


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
