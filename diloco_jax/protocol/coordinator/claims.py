"""Check an island's claims about its steps against the coordinator's leases: an island
makes no step without data, and all of its data was leased to it.

A claim that cannot be true is a corrupt counter or worse. If it were believed, it could
end the run, or outweigh all other islands together.
"""

from __future__ import annotations

from collections.abc import Iterable

from diloco_jax.protocol.coordinator.state import Island, State
from diloco_jax.protocol.messages import Hello, Report
from diloco_jax.protocol.values import Outstanding, Record


def wrong_report(island: Island, report: Report) -> str:
    """Explain why a report cannot be true; empty if it can."""
    steps = max(island.steps, report.steps)
    new = (r for r in report.records if r.seq > island.records_through)
    return _wrong_steps(
        report.steps, island.sequences_per_step, island.sequences_granted
    ) or _wrong_records(steps, new)


def wrong_hello(island: Island, event: Hello) -> str:
    """Explain why the hello of a known incarnation cannot be true; empty if it can."""
    steps = max(island.steps, event.steps)
    return _wrong_steps(
        event.steps, island.sequences_per_step, island.sequences_granted
    ) or _wrong_takes(steps, event.outstanding)


def wrong_carried(state: State, event: Hello) -> str:
    """Explain why the hello of an incarnation from an earlier term cannot be true;
    empty if it can. Its leases are lost, but a term begins beyond all of them."""
    if event.sequences_granted > state.next_position:
        return (
            f"it says that it was granted {event.sequences_granted} sequences, but all "
            f"islands together were granted at most {state.next_position}"
        )
    return _wrong_steps(event.steps, event.sequences_per_step, event.sequences_granted)


def _wrong_steps(steps: int, sequences_per_step: int, granted: int) -> str:
    if steps * sequences_per_step <= granted:
        return ""
    return (
        f"it has made {steps} steps of {sequences_per_step} sequences, but "
        f"{granted} were leased to it, enough for {granted // sequences_per_step}"
    )


def _wrong_records(steps: int, records: Iterable[Record]) -> str:
    for record in records:
        # The steps before `start` are in the books of an earlier term.
        end = record.start if record.kind == "carried" else record.step
        begin = record.start if record.kind == "took" else end
        if not begin <= end <= steps:
            return (
                f"its record {record.seq} ({record.kind}) names steps [{begin}, {end}),"
                f" but it has made {steps}"
            )
    return ""


def _wrong_takes(steps: int, takes: Iterable[Outstanding]) -> str:
    for take in takes:
        if not take.start <= take.end <= steps:
            return (
                f"its take of fragment {take.fragment}, tick {take.tick}, holds steps "
                f"[{take.start}, {take.end}), but it has made {steps}"
            )
    return ""
