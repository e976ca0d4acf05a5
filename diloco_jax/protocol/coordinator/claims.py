"""Check an island's claims about its steps against the coordinator's leases and clock:
an island makes no step without data, all of its data was leased to it, and steps take
time.

A claim that cannot be true is a corrupt counter or worse. If it were believed, it could
end the run, or outweigh all other islands together.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from diloco_jax.protocol.coordinator import leases
from diloco_jax.protocol.coordinator.islands import (
    FASTER,
    FIRST_LEASE_STEPS,
    LATE_S,
    SHORTEST_STEP_S,
    Island,
    Islands,
    WallTime,
)
from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.messages import Hello, Outstanding, Record, Report


def wrong(island: Island, said: Report | Hello) -> str:
    """Explain why what a known incarnation says cannot be true; empty if it can."""
    size, granted = island.sequences_per_step, island.sequences_granted
    if text := _wrong_steps(said.steps, size, granted):
        return text
    steps = max(island.steps, said.steps)
    if isinstance(said, Hello):
        return _wrong_takes(steps, said.outstanding)
    return _wrong_records(steps, said.records)


def heard(
    config: PolicyConfig, island: Island, said: Report | Hello, now: float
) -> tuple[Island, str]:
    """Return a known incarnation with the steps and the step time that it says it has;
    or as it was, and why that cannot be true."""
    shortest_s = shortest_step_s(config, island.name, island.sequences_per_step)
    more = max(0, said.steps - island.steps)
    before = island.wall_time
    unused_s = before.unused_at(now, _most_unused_s(config, shortest_s))
    if more * shortest_s > FASTER * unused_s:
        return island, (
            f"it has made {more} steps more in {unused_s:.3g} s, but no step "
            f"takes less than {shortest_s / FASTER:.3g} s by the coordinator's config "
            f"(islands.{island.name}: topology, mesh_*, batch_size, step_seconds); if "
            f"that is wrong, correct it there"
        )
    memory_s = config.lease_s if island.counted else 0.0
    unused_s -= more * shortest_s / FASTER
    wall_time = before.heard(now, unused_s, more, memory_s)
    step_s = _no_shorter(said.step_seconds, shortest_s) or island.step_seconds
    steps = island.steps + more
    island = replace(island, steps=steps, step_seconds=step_s, wall_time=wall_time)
    return island, ""


def joining(
    config: PolicyConfig,
    island: Island,
    before: Island | None,
    now: float,
    *,
    carrying: bool,
) -> WallTime:
    """Return the wall time of an incarnation that joins. before: the last one in this
    term. carrying: it comes from an earlier term, so a step of it may be under way."""
    step_s = 0.0
    if carrying:
        shortest_s = shortest_step_s(config, island.name, island.sequences_per_step)
        step_s = shortest_s / FASTER
    if before is None:
        found = unheard(config, island, now) if carrying else WallTime(heard_at=now)
    else:
        # Once in a term: a liar would come again and again.
        under_way_s = 0.0 if before.wall_time.carried else step_s
        found = before.wall_time.next_incarnation(now, LATE_S + step_s, under_way_s)
    return replace(found, carried=found.carried or carrying)


def unheard(config: PolicyConfig, island: Island, now: float) -> WallTime:
    """Return the wall time of an incarnation that no coordinator has heard for a time
    that this one does not know: after a crash, and once in a later term."""
    shortest_s = shortest_step_s(config, island.name, island.sequences_per_step)
    # Steps that only the coordinator before had heard of may be many more than an
    # outage's: no merge may have told of them since the last snapshot.
    leased = island.sequences_granted // island.sequences_per_step - island.steps
    most_s = max(_most_unused_s(config, shortest_s), leased * shortest_s / FASTER)
    return WallTime(heard_at=now, unused_s=most_s)


def slept(state: State, seconds: float) -> State:
    """Return the state after the coordinator's clock stood still for so long. Islands
    made steps meanwhile, no more than they had data for."""
    later = [
        replace(island, wall_time=island.wall_time.slept(seconds))
        for island in state.islands.values()
    ]
    return replace(state, islands=Islands(later))


def _most_unused_s(config: PolicyConfig, shortest_s: float) -> float:
    """Return the wall time that is kept for later claims. An island that is not heard
    makes no more steps than that, since it has no data for them."""
    first_s = FIRST_LEASE_STEPS * shortest_s
    return config.outage_budget_s + first_s + LATE_S


def shortest_step_s(config: PolicyConfig, name: str, sequences: int) -> float:
    """Return the shortest time that is believed of an island's step, in seconds."""
    least = config.least_seconds.get(name, config.least_seconds.get("", 0.0))
    return max(least * sequences, SHORTEST_STEP_S)


def believed_step_s(config: PolicyConfig, said: Hello) -> float:
    """Return the step time of a hello as far as it is believed; 0: unknown."""
    shortest_s = shortest_step_s(config, said.island, said.sequences_per_step)
    return _no_shorter(said.step_seconds, shortest_s)


def _no_shorter(step_s: float, shortest_s: float) -> float:
    return max(step_s, shortest_s) if step_s > 0 else 0.0


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
    unheard = leases.most_unheard(config, believed_step_s(config, event), size)
    steps = event.steps - unheard // size
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
