"""What an island says of its steps is held against what the coordinator knows itself:
an island makes no step without data, and all of its data was leased to it.

A claim that cannot be true is a corrupt counter or worse. Believed, it would end the
run, or weigh more than all other islands together.
"""

from __future__ import annotations

from collections.abc import Iterable

from diloco_jax.protocol.coordinator.state import Island, State
from diloco_jax.protocol.messages import Hello, Report
from diloco_jax.protocol.values import Outstanding, Record


def wrong_report(island: Island, report: Report) -> str:
    """Why a report cannot be true; empty if it can."""
    steps = max(island.steps, report.steps)
    new = (r for r in report.records if r.seq > island.records_through)
    return _wrong_steps(
        report.steps, island.sequences_per_step, island.sequences_granted
    ) or _wrong_records(steps, new)


def wrong_hello(island: Island, event: Hello) -> str:
    """Why the hello of an incarnation that was here before cannot be true."""
    steps = max(island.steps, event.steps)
    return _wrong_steps(
        event.steps, island.sequences_per_step, island.sequences_granted
    ) or _wrong_takes(steps, event.outstanding)


def wrong_carried(state: State, event: Hello) -> str:
    """Why the hello of an incarnation that began in an earlier term, whose leases are
    not known any more, cannot be true. A term begins beyond all that was granted."""
    if event.sequences_granted > state.next_position:
        return (
            f"it has been granted {event.sequences_granted} sequences, of "
            f"{state.next_position} that all islands together can have been"
        )
    return _wrong_steps(event.steps, event.sequences_per_step, event.sequences_granted)


def _wrong_steps(steps: int, sequences_per_step: int, granted: int) -> str:
    if steps * sequences_per_step <= granted:
        return ""
    return (
        f"it has made {steps} steps of {sequences_per_step} sequences, and "
        f"{granted} were leased to it, enough for {granted // sequences_per_step}"
    )


def _wrong_records(steps: int, records: Iterable[Record]) -> str:
    for record in records:
        # An earlier term has the steps before `start` in its books.
        end = record.start if record.kind == "carried" else record.step
        begin = record.start if record.kind == "took" else end
        if not begin <= end <= steps:
            return (
                f"its record {record.seq} ({record.kind}) is of steps [{begin}, {end}) "
                f"where it has made {steps}"
            )
    return ""


def _wrong_takes(steps: int, takes: Iterable[Outstanding]) -> str:
    for take in takes:
        if not take.start <= take.end <= steps:
            return (
                f"its take of fragment {take.fragment}, tick {take.tick}, holds steps "
                f"[{take.start}, {take.end}) where it has made {steps}"
            )
    return ""
