"""Bugs planted in a primary or a standby; see `plants`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from diloco_jax.coordinator.standby.gate import Gate
from diloco_jax.protocol.coordinator.events import Note
from diloco_jax.protocol.standby import following, primary
from diloco_jax.protocol.working import BeginWorker
from diloco_jax.simulation.faults.mandate_object import MandateObject
from diloco_jax.simulation.faults.standby_line import FollowLine


def _believed_forever(confirmed: Callable[..., Any]) -> Callable[..., Any]:
    """Let a primary count on its mandate for good once it was written."""

    def broken(state: Any, asked: Any) -> Any:
        return confirmed(replace(state, valid_until=math.inf), asked)

    return broken


def _replaces_any_generation(carry_out: Callable[..., Any]) -> Callable[..., Any]:
    def broken(of: Any, request: Any) -> Any:
        if hasattr(request, "generation"):
            request = replace(request, generation=str(of._writes or ""))
        return carry_out(of, request)

    return broken


def _nothing_waits(gated: object) -> Any:
    """Let everything be seen that the standby does not have."""
    return ()


def _always(in_step: object) -> Any:
    return lambda state: True


def _has_its_disk(begin: Callable[..., Any]) -> Callable[..., Any]:
    return lambda timing, node, *, empty, led: begin(timing, node, empty=False, led=led)


def _counts_as_written(write: Callable[..., Any]) -> Callable[..., Any]:
    def broken(line: Any, changes: Any) -> Any:
        return line.standby.disk.full or write(line, changes)

    return broken


def _does_not_wait_for_the_tape(carry_out: Callable[..., Any]) -> Callable[..., Any]:
    def broken(gate: Any, effect: Any) -> None:
        needs = gate._needs
        carry_out(gate, effect)
        if isinstance(effect, Note):
            gate._needs = needs

    return broken


def _goes_on_after_the_end(read: Callable[..., Any]) -> Callable[..., Any]:
    def broken(state: Any, event: Any, now: float) -> Any:
        if event.mandate is not None:
            event = replace(event, mandate=replace(event.mandate, over=False))
        return read(state, event, now)

    return broken


def _with_whoever_dials(is_newer: object) -> Any:
    return lambda begin, lead, dial: True


STANDBY_PLANTS: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "a_mandate_never_ends": ("mandate", primary, "_confirmed", _believed_forever),
    "late_writes_count": (
        "mandate",
        MandateObject,
        "carry_out",
        _replaces_any_generation,
    ),
    "nothing_waits_for_the_standby": ("in_step", primary, "GATED", _nothing_waits),
    "what_finds_no_room_at_the_standby_counts": (
        "in_step",
        FollowLine,
        "_write",
        _counts_as_written,
    ),
    "nothing_waits_for_the_standbys_tape": (
        "recorded",
        Gate,
        "carry_out",
        _does_not_wait_for_the_tape,
    ),
    "a_lagging_log_counts": ("seen", following, "in_step", _always),
    "a_lost_disk_counts": ("seen", following, "begin", _has_its_disk),
    "a_standby_does_not_end": ("over", following, "_read", _goes_on_after_the_end),
    "a_worker_goes_on_with_whoever_dials": (
        "obeyed",
        BeginWorker,
        "is_newer",
        _with_whoever_dials,
    ),
}
"""The fields of each `plants.Plant`, by its name."""
