"""Shorten a failing schedule: fewer faults, islands and tokens, default settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from diloco_jax.simulation.faults.schedule import Schedule

PLAYS = 400
"""Schedules tried at most."""


def shortest(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Return the shortest schedule found that still fails."""
    plays = 0
    shorter = _shorter(schedule)
    while plays < PLAYS and (candidate := next(shorter, None)) is not None:
        plays += 1
        if fails(candidate):
            schedule, shorter = candidate, _shorter(candidate)
    return schedule


def _shorter(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules with something less, the largest cuts first."""
    faults = schedule.faults
    size = len(faults)
    while size := size // 2 if size > 1 else 0:
        for start in range(0, len(faults), size):
            rest = faults[:start] + faults[start + size :]
            yield replace(schedule, faults=rest)
    if len(faults) == 1:
        yield replace(schedule, faults=())
    for name in schedule.islands:
        yield from _without_island(schedule, name)
    if schedule.workers_apart:
        yield replace(schedule, workers_apart=False)
    if len(schedule.fragment_sizes) > 1:
        yield replace(schedule, fragment_sizes=schedule.fragment_sizes[1:])
    plain: dict[str, Any] = {
        "adopt": "rebase",
        "grace": 0.0,
        "grace_window": "alike",
        "quorum": 1,
        "merge_s": 0.1,
        "transfer_s": 0.2,
    }
    for field, value in plain.items():
        if getattr(schedule, field) != value:
            yield replace(schedule, **{field: value})
    if schedule.extended_to:
        yield replace(schedule, extended_to=schedule.extended_to[:-1])
    for share in (0.5, 0.9):
        tokens = int(schedule.total_tokens * share)
        if 0 < tokens < schedule.total_tokens:
            yield replace(schedule, total_tokens=tokens)


def _without_island(schedule: Schedule, name: str) -> Iterator[Schedule]:
    islands = {n: plan for n, plan in schedule.islands.items() if n != name}
    if schedule.quorum <= len(islands):
        faults = tuple(
            fault for fault in schedule.faults if getattr(fault, "island", "") != name
        )
        yield replace(schedule, islands=islands, faults=faults)
