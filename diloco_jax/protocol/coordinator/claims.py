"""Check an island's claims about its steps against the coordinator's leases: an island
makes no step without data, and all of its data was leased to it.

A claim that cannot be true is a corrupt counter or worse. If it were believed, it could
end the run, or outweigh all other islands together.
"""

from __future__ import annotations

from collections.abc import Iterable

from diloco_jax.protocol.coordinator import leases
from diloco_jax.protocol.coordinator.state import Island, PolicyConfig, State
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
    computed = event.steps * event.tokens_per_step
    if event.own_tokens > computed:
        return (
            f"it says that the run's progress has {event.own_tokens} tokens of its "
            f"steps, but its {event.steps} steps have {computed}"
        )
    return _wrong_steps(event.steps, event.sequences_per_step, event.sequences_granted)


def counted_tokens(config: PolicyConfig, event: Hello, *, known: bool) -> int:
    """Return the tokens of an incarnation from an earlier term that the progress of the
    earlier terms includes.

    All others count as new progress. They can be no more than the data that the island
    got unheard, and come once in a term: else its claims could end the run.

    known: the island has joined in this term before.
    """
    if known:
        return event.steps * event.tokens_per_step
    size = event.sequences_per_step
    # The first grant goes by no speed.
    speeds = (0.0, event.step_seconds)
    largest = max(leases.largest_grant(config, speed, size) for speed in speeds)
    steps = event.steps - leases.LARGEST_GRANTS_UNHEARD * largest // size
    return max(event.own_tokens, steps * event.tokens_per_step)


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
