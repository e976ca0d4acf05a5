"""Communication between the chips of an island in a compiled program.

Bytes are those that one chip sends in a group of n chips: (n - 1) / n of the result of
an all-gather, or of the input of a reduce-scatter or an all-to-all. An all-reduce sends
twice that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from diloco_jax.planning.hlo import (
    CHANNEL,
    COLLECTIVES,
    Computation,
    Instruction,
    Program,
    group_size,
)

ASYNC_FUSION = 'custom_call_target="AsyncCollective'
KERNEL = 'custom_call_target="tpu_custom_call"'
PRODUCTS = ("convolution", "dot")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One operation, in a loop or not."""

    kind: str
    times: int
    """Times that it runs in one run of the program."""
    group: int
    """Chips in its group."""
    sent_bytes: int
    """Bytes that each chip sends, each time."""
    moved_bytes: int
    """Bytes between each chip and its HBM, each time: shard and whole, read and
    written.
    """
    overlaps: bool
    """True if it is started and awaited apart, with other work in between."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSum:
    """All operations of one kind in one run of a program."""

    kind: str
    count: int
    """Runs of all these operations, loops counted."""
    sent_bytes: int
    """Bytes that each chip sends."""
    overlapping: int
    """Runs that overlap with other work, part of `count`."""
    overlapping_bytes: int
    """Bytes of those runs, part of `sent_bytes`."""
    largest_group: int
    """Chips in the largest group."""


def find_collectives(program: Program) -> list[Collective]:
    """Return the collectives of a program, each once, whatever its instructions."""
    found: dict[str, Collective] = {}
    for computation, times in program.executed():
        for part, hidden in _parts(program, computation):
            for instruction in part.instructions.values():
                kind = instruction.opcode.removesuffix("-start")
                if kind not in COLLECTIVES:
                    continue
                overlaps = hidden or kind != instruction.opcode
                if kind == "all-reduce" and part.root.opcode == "dynamic-slice":
                    kind = "reduce-scatter"
                group = group_size(instruction.attributes, program.partitions)
                channel = CHANNEL.search(instruction.attributes)
                # One channel may carry operations of two kinds.
                key = (
                    f"{channel[0]} {kind}"
                    if channel
                    else f"{part.name}/{instruction.name}"
                )
                known = found.get(key)
                found[key] = Collective(
                    kind=kind,
                    times=max(times, known.times if known else 0),
                    group=group,
                    sent_bytes=_sent(kind, instruction, group),
                    moved_bytes=_moved(kind, instruction, group),
                    overlaps=overlaps or bool(known and known.overlaps),
                )
    return [c for c in found.values() if c.group > 1]


def sum_collectives(collectives: Iterable[Collective]) -> list[CollectiveSum]:
    """Sum collectives by kind, the kind with the most bytes first."""
    kinds: dict[str, list[Collective]] = {}
    for collective in collectives:
        kinds.setdefault(collective.kind, []).append(collective)
    sums = [
        CollectiveSum(
            kind=kind,
            count=sum(c.times for c in members),
            sent_bytes=sum(c.times * c.sent_bytes for c in members),
            overlapping=sum(c.times for c in members if c.overlaps),
            overlapping_bytes=sum(
                c.times * c.sent_bytes for c in members if c.overlaps
            ),
            largest_group=max(c.group for c in members),
        )
        for kind, members in kinds.items()
    ]
    return sorted(sums, key=lambda s: (-s.sent_bytes, s.kind))


def _parts(program: Program, at: Computation) -> Iterator[tuple[Computation, bool]]:
    """Yield every computation that runs as part of `at`, and whether it overlaps."""
    for part in program.fused(at):
        yield part, _is_asynchronous(part)
    for start in at.instructions.values():
        if start.opcode == "call-start":
            hidden = _hides(program, _meanwhile(at, start))
            for name in start.called("to_apply"):
                for part in program.fused(program.computations[name]):
                    yield part, hidden


def _is_asynchronous(part: Computation) -> bool:
    return any(ASYNC_FUSION in i.attributes for i in part.instructions.values())


def _meanwhile(at: Computation, start: Instruction) -> list[Instruction]:
    """Return the instructions that run while a SparseCore works.

    They stand between the instruction that hands over the operands and the instruction
    that awaits the result. An update, if there is one, hands over the operands.
    """
    last, between = start, list[Instruction]()
    instructions = list(at.instructions.values())
    for instruction in instructions[instructions.index(start) + 1 :]:
        if instruction.operands[:1] != (last.name,):
            between.append(instruction)
        elif instruction.opcode == "call-update":
            last, between = instruction, []
        elif instruction.opcode == "call-done":
            break
    return between


def _hides(program: Program, instructions: list[Instruction]) -> bool:
    """Return True if one of them is a product, a kernel or a loop: those take time."""
    return any(
        i.opcode in ("while", *PRODUCTS)
        or KERNEL in i.attributes
        or any(
            inside.opcode in PRODUCTS
            for name in i.called("calls")
            for part in program.fused(program.computations[name])
            for inside in part.instructions.values()
        )
        for i in instructions
    )


def _moved(kind: str, instruction: Instruction, group: int) -> int:
    if not any(array.in_hbm for array in instruction.arrays):
        return 0
    whole = _whole(instruction, group)
    cut = kind in ("all-gather", "reduce-scatter")
    return whole + (whole // group if cut else whole)


def _sent(kind: str, instruction: Instruction, group: int) -> int:
    whole = _whole(instruction, group)
    if kind == "collective-permute":
        return whole
    share = whole * (group - 1) // group
    return 2 * share if kind == "all-reduce" else share


def _whole(instruction: Instruction, group: int) -> int:
    """Bytes of the group's whole array, counted once."""
    octets = instruction.bytes
    if instruction.opcode.endswith("-start") and len(instruction.arrays) > 1:
        # (operands, results, flags): the result of a gather is its largest array.
        octets = max(array.bytes for array in instruction.arrays)
    scattered = instruction.opcode.startswith("reduce-scatter")
    return octets * group if scattered else octets
