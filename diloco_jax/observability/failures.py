"""The failures of a run: who, when, for how long, why as far as the coordinator knows,
and what it cost.

The length of an outage is decided here and nowhere else, by the lines of tape and
metrics. The coordinator feeds the lines that it writes, and puts what they come to into
the summary; a reader of a recorded run feeds the same lines, and finds the same.

An outage begins when the coordinator last heard of the island: as its connection broke
or, of one that fell silent, with its last report. It ends with the first step of the
island's next incarnation, or as the same incarnation is heard again. The coordinator's
own goes from the last line of its tape to its return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from diloco_jax import run_files
from diloco_jax.faults import COORDINATOR
from diloco_jax.observability.tape import lines_after
from diloco_jax.protocol.coordinator.ledger import by_size

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


class NotedFailure(msgspec.Struct, kw_only=True):
    """One failure. Times are unix seconds. Tokens of a delta count once for all
    fragments together, as those of steps do."""

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
    """True if only a release ends it: the island is there, and this is no outage."""
    settled: bool = False
    """True if the run ended in it: nothing is added to it any more."""
    lost_tokens: int = 0
    idle_tokens: int = 0
    """Tokens that it would have computed meanwhile."""
    without: int = 0
    """Merges meanwhile, without it."""
    merged: float | None = None
    """Time of the first merge after it: with the island, or of the coordinator."""

    @property
    def seconds(self) -> float | None:
        """Return how long it lasted; None if it has not ended."""
        return None if self.ended is None else self.ended - self.began

    def told(self, begun: float) -> dict[str, Any]:
        """Return it for `summary.json`. begun: when the run began."""
        merged = self.merged
        return {
            "who": self.who,
            "incarnation": self.incarnation,
            "at_seconds": self.began - begun,
            "seconds": self.seconds,
            "why": self.why,
            "tokens_lost": self.lost_tokens,
            "tokens_not_computed": self.idle_tokens,
            "merges_without": self.without,
            "merged_after_seconds": None if merged is None else merged - self.began,
        }


class SeenIsland(msgspec.Struct, kw_only=True):
    """An island as of the newest lines about it."""

    incarnation: int = 0
    tokens_per_step: int = 0
    median_step_seconds: float = 0.0
    steps: int = 0
    heard: float = 0.0
    """Time of its newest report, or of its hello."""
    here: bool = False
    """Whether it is in the run, or away from it."""
    away_seconds: float = 0.0
    """Length of all its outages that are over."""


class LostTokens(msgspec.Struct, kw_only=True):
    """Tokens that ended incarnations lost, as the ledger counts them: by the fragments'
    parameters, and floored once for each island and reason."""

    fragment_parameters: tuple[int, ...] = ()
    """Of the run; empty: its tape does not tell, and all fragments count alike."""
    booked: dict[str, dict[str, int]] = {}
    """By island and reason what flooring has left over: tokens times parameters, below
    the sum of the parameters."""

    def take(self, line: Mapping[str, Any]) -> int:
        """Return the tokens that are lost with a line of the tape. All of them add up
        to the summary's number."""
        if line["kind"] in ("begun", "term"):
            self.fragment_parameters = tuple(line.get("fragment_parameters", ()))
            self.booked = {}
        if line["kind"] != "left":
            return 0
        tokens, reason = line["lost_tokens_by_fragment"], line["reason"]
        sizes = self.fragment_parameters or (1,) * len(tokens)
        of_island = self.booked.setdefault(line["island"], {})
        over, total = of_island.get(reason, 0), sum(sizes)
        found, of_island[reason] = divmod(over + by_size(sizes, tokens), total)
        return found


class KeptFailures(msgspec.Struct, kw_only=True):
    """What a coordinator's next life must know."""

    failures: list[NotedFailure] = []
    islands: dict[str, SeenIsland] = {}
    newest: float = 0.0
    """Time of the newest line in it."""
    lost: LostTokens = msgspec.field(default_factory=LostTokens)


class Failures:
    """All failures so far, the newest `KEPT`. Lines come in the order of time. Use from
    one thread, or under one lock."""

    def __init__(self, kept: KeptFailures | None = None) -> None:
        """kept: what the life before had."""
        self.kept = kept or KeptFailures()
        self._islands = self.kept.islands
        self._unmerged: dict[str, NotedFailure] = {}
        """The newest failure of each, until it is merged again."""
        for failure in self:
            self._index(failure)

    def __iter__(self) -> Iterator[NotedFailure]:
        """Yield them, the oldest first."""
        return iter(self.kept.failures)

    def _index(self, failure: NotedFailure) -> None:
        self._unmerged[failure.who] = failure
        if failure.merged is not None or failure.settled:
            del self._unmerged[failure.who]

    def _open(self, name: str) -> NotedFailure | None:
        failure = self._unmerged.get(name)
        return failure if failure and failure.ended is None else None

    def catch_up(self, workdir: Path) -> None:
        """Take the lines of a life that had not kept all when it ended."""
        if since := self.kept.newest:
            tape = lines_after(workdir / run_files.TAPE, since)
            metrics = lines_after(workdir / run_files.METRICS, since)
            told = [
                *((self.tape, x) for x in tape),
                *((self.metrics, x) for x in metrics),
            ]
            for take, line in sorted(told, key=lambda pair: pair[1]["time"]):
                take(line)

    def within(self, start: float, stop: float) -> Iterator[NotedFailure]:
        """Yield what failed in [start, stop), the newest first."""
        for failure in reversed(self.kept.failures):
            if failure.began < stop and (failure.ended or stop) >= start:
                yield failure

    def away_seconds(self, name: str, now: float) -> float:
        """Return the length of all outages of an island; one goes on up to now."""
        known, failure = self._islands.get(name), self._open(name)
        over = known.away_seconds if known else 0.0
        goes_on = failure is not None and not failure.quarantine
        return over + (now - failure.began if failure and goes_on else 0.0)

    def add(self, failures: Iterable[NotedFailure]) -> None:
        """Take failures as they are known, such as those of an emulation."""
        for failure in failures:
            self._note(failure)
            if failure.ended is not None:
                self._end(failure, failure.ended)

    def move(self, seconds: float) -> None:
        """Move all times on, as those of a run that was stopped for so long."""
        for failure in self:
            failure.began += seconds
            failure.ended = failure.ended and failure.ended + seconds
            failure.merged = failure.merged and failure.merged + seconds

    # ---- lines ----------------------------------------------------------------------

    def tape(self, line: Mapping[str, Any]) -> int:
        """Take a line of the tape; return the tokens that are lost with it."""
        self.kept.newest = time = line["time"]
        lost_tokens = self.kept.lost.take(line)
        match line["kind"]:
            case "joined":
                self._joined(line, time)
            case "absent":
                self._absent(line["island"], line["why"], time)
            case "resumed":
                self._resumed(line["island"], time)
            case "left":
                self._left(line, time, lost_tokens)
            case "quarantined":
                failure = self._begin(line["island"], time, "")
                failure.why = (
                    f"quarantine: {line['refused']} of its deltas in a row were unfit "
                    f"(not finite, too long, or with wrong counts)"
                )
                failure.quarantine = True
            case "released":
                if (found := self._open(line["island"])) is not None:
                    self._end(found, time)
            case "merged":
                self._merged({part["island"] for part in line["contributions"]}, time)
            case "recovered" | "term":
                self._recovered(line, time)
            case "finished":
                # Nobody is awaited any more, and goodbyes come in order.
                for name, known in self._islands.items():
                    known.away_seconds = self.away_seconds(name, time)
                    known.here = False
                for failure in self._unmerged.values():
                    failure.settled = True
                self._unmerged.clear()
        return lost_tokens

    def metrics(self, line: Mapping[str, Any]) -> None:
        """Take a line of the metrics."""
        self.kept.newest = time = line["time"]
        if line["kind"] != "island":
            return
        name = line["island"]
        known, failure = self._of(name), self._open(name)
        known.median_step_seconds = (
            line["median_step_seconds"] or known.median_step_seconds
        )
        steps, known.steps, known.heard = line["step"] - known.steps, line["step"], time
        if failure is None or failure.quarantine or steps <= 0:
            return
        newer = known.incarnation > failure.incarnation
        if newer if failure.replaced else line["phase"] == "training":
            first = time - steps * known.median_step_seconds if newer else time
            self._end(failure, max(failure.began, first))

    # ---- what they say --------------------------------------------------------------

    def _of(self, name: str) -> SeenIsland:
        return self._islands.setdefault(name, SeenIsland())

    def _joined(self, line: Mapping[str, Any], time: float) -> None:
        known = self._of(line["island"])
        if known.incarnation != line["incarnation"]:
            known.incarnation, known.heard = line["incarnation"], time
            known.steps = (line.get("carried") or {}).get("steps", 0)
        known.tokens_per_step, known.here = line["tokens_per_step"], True

    def _absent(self, name: str, why: str, time: float) -> None:
        began = self._heard(name, time) if why == "silent" else time
        self._begin(name, began, BROKE.get(why, why))

    def _heard(self, name: str, time: float) -> float:
        """Return when an island was last heard."""
        return min(self._of(name).heard or time, time)

    def _left(self, line: Mapping[str, Any], time: float, lost_tokens: int) -> None:
        """Note the end of an incarnation, with what it cost."""
        name, incarnation, reason = line["island"], line["incarnation"], line["reason"]
        known, failure = self._of(name), self._open(name)
        here = known.here
        if known.incarnation == incarnation and reason not in ENDS:
            known.here = False
        if not here:
            return
        if failure is None or failure.incarnation != incarnation:
            if reason not in ENDS:
                return
            # Its successor may say hello before anybody has noticed.
            failure = self._begin(name, self._heard(name, time), "")
            failure.incarnation = incarnation
        failure.lost_tokens += lost_tokens
        failure.replaced = True
        said = f": {line['said']}" if line["said"] else ""
        failure.why = ENDS.get(reason, failure.why) + said

    def _resumed(self, name: str, time: float) -> None:
        failure, known = self._open(name), self._of(name)
        known.heard, known.here = time, True
        if failure is not None and not failure.replaced:
            failure.why += "; the same process is back"
            self._end(failure, time)

    def _merged(self, islands: set[str], time: float) -> None:
        for name, failure in list(self._unmerged.items()):
            there = name in islands or name == COORDINATOR
            if there and failure.ended is not None:
                failure.merged = time
                del self._unmerged[name]
            elif not there:
                failure.without += 1

    def _recovered(self, line: Mapping[str, Any], time: float) -> None:
        """Note that the coordinator came back to islands that were in the run."""
        since = line.get("since")
        if not since or not any(known.here for known in self._islands.values()):
            return
        why = "it had lost its state: a new term began with anchors of islands"
        if line["kind"] == "recovered":
            why = (
                f"its process ended: killed, crashed or stopped; it came back from "
                f"snapshot {line['snapshot']} and {line['records']:,} records of its "
                f"log"
            )
        failure = NotedFailure(
            who=COORDINATOR,
            incarnation=0,
            began=since,
            why=why,
            ended=time,
        )
        self._note(failure)

    def _begin(self, name: str, began: float, why: str) -> NotedFailure:
        before, incarnation = self._open(name), self._of(name).incarnation
        if before is not None and before.incarnation == incarnation:
            return before
        if before is not None:
            self._end(before, max(before.began, began))
        failure = NotedFailure(who=name, incarnation=incarnation, began=began, why=why)
        return self._note(failure)

    def _note(self, failure: NotedFailure) -> NotedFailure:
        self.kept.failures.append(failure)
        del self.kept.failures[:-KEPT]
        self._index(failure)
        return failure

    def _end(self, failure: NotedFailure, time: float) -> None:
        known, failure.ended = self._of(failure.who), time
        if failure.quarantine:
            return
        away = time - failure.began
        known.away_seconds += away
        if failure.replaced and known.median_step_seconds:
            speed = known.tokens_per_step / known.median_step_seconds
            failure.idle_tokens = round(away * speed)
