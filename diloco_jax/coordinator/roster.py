"""Islands' measures of themselves, over all their incarnations.

They are kept apart from the protocol, since no decision depends on them, in a small
file that is replaced about once a second. A coordinator's crash costs the summary
nothing.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from diloco_jax import run_files
from diloco_jax.files import json_number, naming
from diloco_jax.observability.failures import Failures, KeptFailures
from diloco_jax.observability.measures import IslandMeasure
from diloco_jax.protocol.coordinator.ledger import Totals
from diloco_jax.protocol.messages import (
    MAX_BYTES,
    MAX_COUNT,
    MAX_SECONDS,
    MAX_TOKENS,
    Measures,
    Record,
)

logger = logging.getLogger(__name__)

INTERVALS_KEPT = 64
"""Activity intervals per island; beyond it, the oldest two become one."""
STOPPING_S = 60.0
"""An island last seen within these seconds before the newest sign of life of any
island was in the run when it stopped."""
MAX_PAST_TOKENS = 2**62
"""Highest sum of tokens: the file holds whole numbers of 64 bits."""
OF_SECONDS = tuple(name for name in Measures.__struct_fields__ if "_seconds" in name)
LATE_S = 60.0
"""Seconds by which clocks may differ, and a hello may come late."""
RATE_OVER_S = 5.0
"""Seconds over which rates are taken: fragments travel in bursts."""


class MeasuredIsland(msgspec.Struct, kw_only=True):
    """Measures of one island. Times are unix seconds; `past` sums the ended
    incarnations."""

    tokens_per_step: int
    """Tokens per step of the newest incarnation."""
    past_tokens: int = 0
    past_seconds: float = 0.0
    """Seconds of the steps of ended incarnations, each step as long as its
    incarnation's median."""
    first_seen: float
    last_seen: float
    ended: bool = False
    incarnation: int = 0
    current: Measures = Measures()
    past: Measures = Measures()
    active: list[tuple[float, float]] = []
    last_sign: float = 0.0
    first_compile_seconds: float = 0.0
    own_data: bool = False
    """True if the newest incarnation's steps use other data than is leased to it."""
    steps_before: int | None = None
    """Steps before the first hello here of an incarnation that was in the run when the
    coordinator lost its state; None if it began here."""
    incarnations: int = 0
    resumed: int = 0
    """Times that the island came again since the run as a whole was stopped."""
    awaited: bool = False
    """True if the island was in the run when that was stopped, and has not come
    again."""
    adopted: dict[int, int] = {}
    """Version number by fragment, of the current incarnation."""
    bytes_per_second: tuple[float, float] = (0.0, 0.0)
    """Rates up and down over the last `RATE_OVER_S` of reports, without joins."""
    rate_since: tuple[float, int, int] = (0.0, 0, 0)
    """Start of that interval, and the incarnation's bytes up to then."""


class Incarnation(Protocol):
    """An incarnation that says hello, with the fields of `protocol.messages.Hello`."""

    @property
    def island(self) -> str:
        """Name of the island."""

    @property
    def incarnation(self) -> int:
        """Number of the process among all processes of this island."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step over all hosts and devices of the island."""


class Roster:
    """All islands that ever said hello, and what failed. Only the lead's thread uses
    it."""

    def __init__(self, path: Path | None = None) -> None:
        """path: the file that `save` writes; it is read if it exists, and so is the one
        of the failures beside it."""
        self._path = path
        self.members: dict[str, MeasuredIsland] = {}
        self.before: Mapping[str, Totals] = {}
        """Tokens of islands before the roster began, which no measure includes."""
        self.failures = Failures()
        if path is not None:
            self.members = _read(path, dict[str, MeasuredIsland]) or {}
            beside = path.with_name(run_files.FAILURES)
            self.failures = Failures(_read(beside, KeptFailures))

    @classmethod
    def begin_from(cls, path: Path) -> Roster:
        """Load the files that the coordinator's last life left."""
        roster = cls(path)
        roster.failures.catch_up(path.parent)
        return roster

    def hello(
        self,
        hello: Incarnation,
        now: float,
        *,
        steps_before: int | None = None,
        own_data: bool = False,
    ) -> None:
        """Note that an incarnation was let in. steps_before: steps that it had made, if
        it was in the run when the coordinator lost its state. own_data: as its hello
        says."""
        member = self.members.get(hello.island)
        if member is None:
            member = self.members[hello.island] = MeasuredIsland(
                tokens_per_step=hello.tokens_per_step,
                first_seen=now,
                last_seen=now,
                steps_before=steps_before,
            )
        if member.incarnation != hello.incarnation:
            member.incarnations += 1
            member.resumed += member.awaited
            member.awaited = False
            member.bytes_per_second, member.rate_since = (0.0, 0.0), (now, 0, 0)
        if member.incarnation not in (0, hello.incarnation):
            self._fold(member)
        member.incarnation = hello.incarnation
        member.tokens_per_step, member.own_data = hello.tokens_per_step, own_data
        member.ended = False
        member.last_seen = now

    def report(
        self,
        island: str,
        measures: Measures,
        records: tuple[Record, ...],
        now: float,
        asked_cycle: int = MAX_COUNT,
    ) -> None:
        """Take an island's newest measures of its incarnation. asked_cycle: the last
        cycle that it was to evaluate; it counts for no other."""
        member = self.members.get(island)
        if member is None:
            return
        if not member.current.watched_cycle < measures.watched_cycle <= asked_cycle:
            measures = msgspec.structs.replace(
                measures,
                watched_cycle=member.current.watched_cycle,
                watched_loss=member.current.watched_loss,
            )
        most_s = now - member.first_seen + LATE_S
        if member.steps_before is not None:  # It began elsewhere.
            most_s = MAX_SECONDS
        measures = _bounded(measures, now, most_s)
        if member.incarnations == 1 and member.steps_before is None:
            member.first_compile_seconds = measures.compile_seconds
        member.current = measures
        member.last_seen = member.last_sign = now
        since, up, down = member.rate_since
        if (seconds := now - since) >= RATE_OVER_S:
            up, down = measures.bytes_up - up, measures.bytes_down - down
            member.bytes_per_second = (up / seconds, down / seconds)
            member.rate_since = (now, measures.bytes_up, measures.bytes_down)
        for record in records:
            if record.kind == "adopted":
                member.adopted[record.fragment] = record.version.number

    def left(self, island: str, now: float) -> None:
        """Note that an island is gone for good."""
        member = self.members.get(island)
        if member is not None:
            member.ended, member.last_seen = True, now

    def resume(self, stopped_s: float) -> dict[tuple[str, int], int]:
        """Continue after a stop of `stopped_s` seconds: every incarnation has ended,
        and times move on as if there had been no stop.

        Returns the steps that each incarnation last reported, by name and incarnation.
        """
        steps = {}
        stop = max((member.last_seen for member in self.members.values()), default=0.0)
        for name, member in self.members.items():
            steps[name, member.incarnation] = member.current.steps
            member.awaited = member.last_seen >= stop - STOPPING_S
            self._fold(member)
            member.ended = True
            member.first_seen += stopped_s
            member.last_seen += stopped_s
            member.last_sign += stopped_s
            member.active = [(a + stopped_s, b + stopped_s) for a, b in member.active]
        self.failures.move(stopped_s)
        return steps

    def saved_unix(self) -> float:
        """Return the unix time at which `save` last wrote the file."""
        assert self._path is not None
        return self._path.stat().st_mtime if self._path.exists() else time.time()

    def save(self) -> None:
        """Replace the files, each atomically."""
        assert self._path is not None
        beside = self._path.with_name(run_files.FAILURES)
        for path, held in ((beside, self.failures.kept), (self._path, self.members)):
            scratch = path.with_suffix(".tmp")
            with naming(path):
                scratch.write_bytes(msgspec.msgpack.encode(held))
            os.replace(scratch, path)

    def measures(self, island: str) -> Measures:
        """Return sums and extremes over all incarnations."""
        member = self.members[island]
        return _sum(member.past, member.current)

    def watched_by(self, island: str) -> dict[str, Any]:
        """Return the newest cycle whose merged model this island has evaluated, with
        its loss; {} if there is none.
        """
        if island not in self.members or not self.measures(island).watched_cycle:
            return {}
        sums = self.measures(island)
        return {
            "cycle": sums.watched_cycle,
            "island": island,
            "eval_loss": json_number(sums.watched_loss),
        }

    def watched(self) -> dict[str, Any] | None:
        """Return `watched_by` of the island that evaluated the newest cycle; None if no
        island has evaluated one.
        """
        found = filter(None, map(self.watched_by, sorted(self.members)))
        return max(found, key=lambda point: int(point["cycle"]), default=None)

    def measure(
        self, island: str, computed: int, merged: int, now: float, carried: int = 0
    ) -> IslandMeasure:
        """Return the inputs of goodput. carried: tokens of earlier terms, which the
        other measures do not include."""
        member = self.members[island]
        if (before := self.before.get(island)) is not None:
            computed, merged = computed - before.computed, merged - before.merged
        until = member.last_seen if member.ended else now
        active = [
            (max(start, member.first_seen), end)
            for start, end in (*member.active, *_activity(member.current))
            if end > member.first_seen
        ]
        sums = self.measures(island)
        # The first compilation and validation are no outages; compiling again after an
        # outage is part of it.
        apart = member.first_compile_seconds + sums.eval_seconds
        tokens_per_step, median_step_seconds = _mean_step(member)
        provisioned_seconds = max(until - member.first_seen - apart, 0.0)
        if member.steps_before is not None:
            # The tokens of these steps that are not carried count here, and so does
            # their time.
            counted = member.steps_before - carried / tokens_per_step
            provisioned_seconds += max(counted, 0.0) * median_step_seconds
        return IslandMeasure(
            provisioned_seconds=provisioned_seconds,
            tokens_per_step=tokens_per_step,
            median_step_seconds=median_step_seconds,
            computed_tokens=computed,
            merged_tokens=merged,
            active=tuple(active),
        )

    def _fold(self, member: MeasuredIsland) -> None:
        member.active += _activity(member.current)
        while len(member.active) > INTERVALS_KEPT:
            first, second, *rest = member.active
            member.active = [(first[0], second[1]), *rest]
        member.past_tokens, member.past_seconds = _made(member)
        member.past = _sum(member.past, member.current)
        member.current = Measures()
        member.adopted = {}


def _read(path: Path, kind: Any) -> Any:
    """Return what a file holds; None if there is none. One that cannot be read, as
    after a power cut, is put aside: no decision depends on it."""
    if not path.exists():
        return None
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        wrong = f"{path} cannot be read ({error}); restore it from a copy"
    damaged = path.with_suffix(".damaged")
    os.replace(path, damaged)
    logger.warning(
        "%s; it is %s now, and what it held is missing in status and summary",
        wrong,
        damaged,
    )
    return None


def _bounded(measures: Measures, now: float, most_s: float) -> Measures:
    """Return the measures without times that are later or longer than can be: they
    would spoil the figures of the whole run."""
    limits = dict.fromkeys(OF_SECONDS, most_s)
    limits |= {"first_step_unix": now, "last_step_unix": now}
    found = {name: min(getattr(measures, name), most) for name, most in limits.items()}
    return msgspec.structs.replace(measures, **found)


def _made(member: MeasuredIsland) -> tuple[int, float]:
    """Return the tokens of all steps, and the undisturbed seconds that these steps
    take."""
    now = member.current
    return (
        min(member.past_tokens + now.steps * member.tokens_per_step, MAX_PAST_TOKENS),
        member.past_seconds + now.steps * now.median_step_seconds,
    )


def _mean_step(member: MeasuredIsland) -> tuple[float, float]:
    """Return the tokens and undisturbed seconds of a mean step over all incarnations.
    Their batches may differ, as where a run goes on with other batches."""
    tokens, seconds = _made(member)
    steps = member.past.steps + member.current.steps
    if not steps:
        return member.tokens_per_step, 0.0
    return tokens / steps, seconds / steps


def _activity(measures: Measures) -> list[tuple[float, float]]:
    if not measures.steps:
        return []
    return [(measures.first_step_unix, measures.last_step_unix)]


ADDED = {
    **dict.fromkeys(
        ("steps", "skipped_steps", "microseconds_up", "transfers_failed"), MAX_COUNT
    ),
    "tokens_predicted": MAX_TOKENS,
    **dict.fromkeys(("bytes_up", "bytes_down", "bytes_join"), MAX_BYTES),
    **dict.fromkeys(
        (
            *("step_seconds_total", "stalled_seconds", "data_seconds"),
            *("eval_seconds", "compile_seconds"),
        ),
        MAX_SECONDS,
    ),
}
"""Measures that add up over incarnations, and the most of each."""


def _sum(past: Measures, current: Measures) -> Measures:
    """Add what adds up. The median is that of the longer one, losses are the newest."""
    longer = current if current.steps >= past.steps else past
    newest = current if current.steps else past
    watched = current if current.watched_cycle else past
    return msgspec.structs.replace(
        newest,
        **{
            name: min(getattr(past, name) + getattr(current, name), most)
            for name, most in ADDED.items()
        },
        median_step_seconds=longer.median_step_seconds,
        max_step_gap_seconds=max(
            past.max_step_gap_seconds, current.max_step_gap_seconds
        ),
        watched_cycle=watched.watched_cycle,
        watched_loss=watched.watched_loss,
        first_step_unix=past.first_step_unix or current.first_step_unix,
        last_step_unix=max(past.last_step_unix, current.last_step_unix),
        short=current.short,
        programs_left=current.programs_left,
        fragments_left=current.fragments_left,
    )
