"""Whether a run is healthy, at a glance: one word, and what is wrong now.

It reads the coordinator's status, or the summary. Alerts are told once when something
begins, so they are no answer to what is wrong now.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

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
    for worker in status.get("workers", ()):
        if not worker["address"]:
            yield f"worker {worker['worker']} is away"
    yield from status.get("wrong", ())


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
