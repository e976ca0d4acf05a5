"""Say while a run goes on what each strike has cost, as soon as that is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.chaos import measure
from diloco_jax.chaos.tail import Tail
from diloco_jax.faults import COORDINATOR


class LiveReport:
    """Follows the tape of a run; say: tells people."""

    def __init__(
        self, workdir: Path, islands: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self._islands, self._say = tuple(islands), say
        self._tail = Tail(workdir / run_files.TAPE)
        self._struck: list[measure.Line] = []
        self._tape: list[dict[str, Any]] = []
        """Lines since the first strike whose cost is not told yet."""
        self._told: set[tuple[str, float]] = set()

    def struck(self, strike: measure.Line) -> None:
        """Take a strike into account, a line of `chaos.jsonl`."""
        self._struck.append(strike)

    def look(self) -> None:
        """Read what is new, and tell the costs that it shows."""
        self._tape += self._tail.new()
        found = measure.measured(self._struck, self._tape, self._islands)
        for number, outcome in enumerate(found):
            if (outcome.who, outcome.time) in self._told:
                continue
            # A later strike there leaves no time in which more could become known.
            ends = (outcome.who, COORDINATOR)
            later = any(
                o.who in ends and o.time > outcome.time for o in found[number + 1 :]
            )
            if outcome.merged_s is not None or later:
                self._told.add((outcome.who, outcome.time))
                self._say(in_words(outcome))
        self._forget()

    def _forget(self) -> None:
        """Drop what no strike needs whose cost is not told yet."""
        found = measure.measured(self._struck, (), self._islands)
        open_now = [o.time for o in found if (o.who, o.time) not in self._told]
        since = min(open_now, default=math.inf)
        self._struck = [s for s in self._struck if s["time"] >= since]
        self._tape = [r for r in self._tape if r["time"] >= since]
        self._told = {key for key in self._told if key[1] >= since}


def in_words(outcome: measure.StrikeOutcome) -> str:
    """Return what a strike cost, in one line."""
    parts = [
        f"{what} after {seconds:.1f} s"
        for what, seconds in (
            ("noticed", outcome.detected_s),
            ("back", outcome.back_s),
            ("merged again", outcome.merged_s),
        )
        if seconds is not None
    ]
    if outcome.tokens_lost:
        parts.append(f"{outcome.tokens_lost:,} tokens lost")
    told = ", ".join(parts) or "struck again before anything was known"
    return f"{outcome.who} after {outcome.kind}: {told}"
