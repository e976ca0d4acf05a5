"""Bytes that a compiled program sends between chips, and moves between chip and HBM.

Both are read from the program's text, of which XLA prints one instruction per line.
`Compiled.cost_analysis()` does not serve: it counts the body of a loop once, and arrays
in fast memory as if they lay in HBM. A loop runs as often as the constant says that its
condition compares the counter with. On TPUs

  - an asynchronous all-gather is cut into fusions: a start, steps that hide it behind
    matrix products, and a done; all hold a copy of it under one channel id;
  - a collective that a SparseCore carries out is a computation of its own: call-start
    calls it, call-update gives it its operands and call-done awaits it;
  - a fusion of an all-reduce and a slice of its result is one operation, a
    reduce-scatter.

Sent are the bytes of one chip in a group of n chips: (n - 1) / n of the result of an
all-gather, or of the input of a reduce-scatter or an all-to-all; twice that for an
all-reduce. Moved is what an instruction reads and writes, as far as it lies in HBM. A
fusion reads only what it uses: the slices of an operand that is only sliced, and
nothing of an operand that is updated in place.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all"),
    *("collective-permute", "ragged-all-to-all", "collective-broadcast"),
)
PRODUCTS = ("convolution", "dot")
SLICES = ("dynamic-slice", "slice", "gather")
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("while", "conditional", "call", "partition-id", "replica-id", "iota", "domain"),
    *("opt-barrier", "copy-done", "async-done", "slice-done"),
    # Given to a SparseCore: the work itself is counted where it is defined.
    *("call-start", "call-update", "call-done"),
    # One collective is many instructions: `find_collectives` sums them.
    *(f"{kind}{part}" for kind in COLLECTIVES for part in ("", "-start", "-done")),
}
PASSED_ON = ("tuple", "custom-call", *COLLECTIVES)
"""Operations that pass their operands on: inside a fusion they are not counted."""
ASYNC_FUSION = 'custom_call_target="AsyncCollective'
KERNEL = 'custom_call_target="tpu_custom_call"'
ARRAY = re.compile(r"([a-z]+(\d*)\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"(ROOT )?%([\w.\-]+) = ")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = r"{}=\{{?((?:%[\w.\-]+(?:, )?)+)"
CHANNEL = re.compile(r"channel_id=(\d+)")
LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
IOTA_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
PARTITIONS = re.compile(r"num_partitions=(\d+)")


class Instruction(NamedTuple):
    """One line of the text."""

    name: str
    opcode: str
    arrays: tuple[tuple[int, bool], ...]
    """Bytes of each array of the result, and whether it lies in HBM rather than in a
    chip's fast memory or in the host's."""
    inside: str
    """The text in its parentheses: operands, a constant's value, or the position of a
    parameter."""
    attributes: str
    root: bool
    """True if the computation returns its result."""

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return NAME.findall(self.inside)

    @property
    def bytes(self) -> int:
        """Bytes of the result, wherever it lies."""
        return sum(octets for octets, _ in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        """Bytes of the result that lie in HBM."""
        return sum(octets for octets, in_hbm in self.arrays if in_hbm)

    def called(self, how: str) -> list[str]:
        """Return the names of the computations that it calls in that way."""
        found = re.findall(CALLED.format(how), self.attributes)
        return [name for names in found for name in NAME.findall(names)]


Computation = dict[str, Instruction]
"""Instructions by name, in the order of the text."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A whole compiled module."""

    computations: dict[str, Computation]
    entry: str
    partitions: int
    """Devices that the program is compiled for."""

    def executed(self, name: str = "", times: int = 1) -> Iterator[tuple[str, int]]:
        """Yield every computation that runs by itself, with the number of its runs: the
        entry and the bodies of its loops. Fused ones are part of their caller."""
        name = name or self.entry
        yield name, times
        for instruction in self.computations[name].values():
            for body in instruction.called("body"):
                rounds = self._trips(*instruction.called("condition"))
                yield from self.executed(body, times * rounds)
            called = instruction.called("branch_computations")
            if instruction.opcode == "call":
                called += instruction.called("to_apply")
            for callee in called:
                yield from self.executed(callee, times)

    def fused(self, name: str) -> Iterator[Computation]:
        """Yield the computation and all its parts, at any depth."""
        yield self.computations[name]
        for instruction in self.computations[name].values():
            for part in instruction.called("calls"):
                yield from self.fused(part)

    def _trips(self, name: str) -> int:
        """Return the iterations of a loop whose counter starts at 0 and goes up by 1.

        Raises ValueError if the condition has another form.
        """
        condition = self.computations[name]
        root = _root(condition)
        if root.opcode == "compare" and "direction=LT" in root.attributes:
            for operand in root.operands:
                if condition[operand].opcode == "constant":
                    return int(condition[operand].inside)
        raise ValueError(
            f"the loop condition {name} ends in {root.opcode} {root.attributes[:200]}; "
            f"expected a comparison with a constant"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveSum:
    """One operation, or all of a kind, in one run of a program, with loops counted."""

    kind: str
    count: int
    sent_bytes: int
    """Bytes that each chip sends."""
    moved_bytes: int = 0
    """Bytes between each chip and its HBM: shard and whole, read and written."""
    overlapping: int
    """Runs that are started and awaited apart, with other work in between."""
    overlapping_bytes: int
    """Bytes of those runs, part of `sent_bytes`."""
    largest_group: int
    """Chips in the largest group."""


def parse(text: str) -> Program:
    """Parse the text of `Compiled.as_text()`.

    Raises ValueError if the text has no entry.
    """
    computations: dict[str, Computation] = {}
    entry, here = "", Computation()
    for line in text.splitlines():
        if not line.startswith(" "):
            if head := COMPUTATION.match(line):
                here = computations[head[2]] = {}
                entry = head[2] if head[1] else entry
        elif found := INSTRUCTION.match(line := line.strip()):
            here[found[2]] = _instruction(line[found.end() :], found)
    if not entry:
        raise ValueError(
            f"no ENTRY in {len(text)} characters: not the text of a compiled program"
        )
    partitions = PARTITIONS.search(text.partition("\n")[0])
    return Program(computations, entry, int(partitions[1]) if partitions else 1)


def find_collectives(program: Program) -> list[CollectiveSum]:
    """Return the collectives of a program, each once, whatever its instructions."""
    found: dict[tuple[str, str], CollectiveSum] = {}
    for name, times in program.executed():
        for part, hidden in _parts(program, name):
            for instruction in part.values():
                kind = instruction.opcode.removesuffix("-start")
                if kind not in COLLECTIVES:
                    continue
                overlaps = hidden or kind != instruction.opcode
                if kind == "all-reduce" and _root(part).opcode == "dynamic-slice":
                    kind = "reduce-scatter"
                channel = CHANNEL.search(instruction.attributes)
                # One channel may carry operations of two kinds.
                key = channel[0] if channel else f"{id(part)} {instruction.name}", kind
                known = found.get(key)
                count = max(times, known.count if known else 0)
                overlaps = overlaps or bool(known and known.overlapping)
                group = group_size(instruction.attributes, program.partitions)
                sent, moved = _sent_and_moved(kind, instruction, group)
                found[key] = CollectiveSum(
                    kind=kind,
                    count=count,
                    sent_bytes=count * sent,
                    moved_bytes=count * moved,
                    overlapping=count * overlaps,
                    overlapping_bytes=count * overlaps * sent,
                    largest_group=group,
                )
    return [c for c in found.values() if c.largest_group > 1]


def sum_collectives(program: Program) -> list[CollectiveSum]:
    """Sum collectives by kind, the kind with the most bytes first."""
    kinds: dict[str, list[CollectiveSum]] = {}
    for collective in find_collectives(program):
        kinds.setdefault(collective.kind, []).append(collective)
    counts = ["count", "sent_bytes", "moved_bytes", "overlapping", "overlapping_bytes"]
    sums = [
        CollectiveSum(
            kind=kind,
            largest_group=max(c.largest_group for c in members),
            **{name: sum(getattr(c, name) for c in members) for name in counts},
        )
        for kind, members in kinds.items()
    ]
    return sorted(sums, key=lambda s: (-s.sent_bytes, s.kind))


def hbm_bytes(program: Program) -> int:
    """Return the bytes that one chip reads and writes in one run, loops counted."""
    return sum(c.moved_bytes for c in find_collectives(program)) + sum(
        times * _moved(program, program.computations[name], instruction)
        for name, times in program.executed()
        for instruction in program.computations[name].values()
    )


def group_size(attributes: str, partitions: int) -> int:
    """Return the number of devices in a collective's group."""
    if found := MESH_GROUPS.search(attributes):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", found[2]))
    if found := IOTA_GROUPS.search(attributes):
        return int(found[1])
    if found := LISTED_GROUPS.search(attributes):
        return len(found[1].split(","))
    return partitions


def _instruction(rest: str, head: re.Match[str]) -> Instruction:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    arrays = tuple(
        (
            math.prod(map(int, filter(None, extents.split(",")))) * int(bits or 8) // 8,
            "S(" not in layout,
        )
        for _, bits, extents, layout in ARRAY.findall(result)
    )
    inside, attributes = rest[opening + 1 : closing], rest[closing + 1 :]
    return Instruction(
        head[2], rest[:opening], arrays, inside, attributes, bool(head[1])
    )


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    raise ValueError(f"unbalanced parentheses in {text[:200]!r}")


def _root(computation: Computation) -> Instruction:
    return next(i for i in computation.values() if i.root)


def _parts(program: Program, name: str) -> Iterator[tuple[Computation, bool]]:
    """Yield every computation that runs as part of another, and whether it overlaps."""
    for part in program.fused(name):
        yield part, any(ASYNC_FUSION in i.attributes for i in part.values())
    instructions = list(program.computations[name].values())
    for start in instructions:
        if start.opcode == "call-start":
            hidden = any(_takes_time(program, i) for i in _while(instructions, start))
            for callee in start.called("to_apply"):
                yield from ((part, hidden) for part in program.fused(callee))


def _while(instructions: list[Instruction], start: Instruction) -> list[Instruction]:
    """Return the instructions that run while a SparseCore works.

    They stand between the instruction that hands over the operands and the instruction
    that awaits the result. An update, if there is one, hands over the operands.
    """
    last, between = start, list[Instruction]()
    for instruction in instructions[instructions.index(start) + 1 :]:
        if instruction.operands[:1] != [last.name]:
            between.append(instruction)
        elif instruction.opcode == "call-update":
            last, between = instruction, []
        elif instruction.opcode == "call-done":
            break
    return between


def _takes_time(program: Program, instruction: Instruction) -> bool:
    """Tell whether it is a product, a kernel or a loop."""
    return (
        instruction.opcode in ("while", *PRODUCTS)
        or KERNEL in instruction.attributes
        or any(
            inside.opcode in PRODUCTS
            for name in instruction.called("calls")
            for part in program.fused(name)
            for inside in part.values()
        )
    )


def _sent_and_moved(kind: str, instruction: Instruction, group: int) -> tuple[int, int]:
    whole = instruction.bytes  # Of the group's whole array, counted once.
    if instruction.opcode.endswith("-start") and len(instruction.arrays) > 1:
        # (operands, results, flags): the result of a gather is its largest array.
        whole = max(octets for octets, _ in instruction.arrays)
    if instruction.opcode.startswith("reduce-scatter"):
        whole *= group
    cut = kind in ("all-gather", "reduce-scatter")
    in_hbm = any(in_hbm for _, in_hbm in instruction.arrays)
    moved = (whole + (whole // group if cut else whole)) * in_hbm
    share = whole * (group - 1) // group
    twice_or_whole = {"all-reduce": 2 * share, "collective-permute": whole}
    return twice_or_whole.get(kind, share), moved


def _moved(program: Program, at: Computation, instruction: Instruction) -> int:
    opcode = instruction.opcode
    if opcode in FREE:
        return 0
    operands = [at[name] for name in instruction.operands]
    if opcode == "fusion":
        (callee,) = instruction.called("calls")
        return _moved_by_fusion(program.computations[callee], operands)
    if opcode in SLICES:
        return 2 * instruction.hbm_bytes
    if opcode == "dynamic-update-slice":
        return 2 * operands[1].hbm_bytes
    if opcode in ("copy-start", "slice-start"):
        # The result names the source again.
        octets, in_hbm = instruction.arrays[0]
        return octets * (in_hbm + bool(operands and operands[0].hbm_bytes))
    return instruction.hbm_bytes + sum(operand.hbm_bytes for operand in operands)


def _moved_by_fusion(inside: Computation, operands: list[Instruction]) -> int:
    moved = 0
    parameters = [i for i in inside.values() if i.opcode == "parameter"]
    parameters.sort(key=lambda i: int(i.inside))
    for parameter, operand in zip(parameters, operands, strict=True):
        if operand.hbm_bytes:
            moved += min(operand.hbm_bytes, _read(parameter, inside))
    root = _root(inside)
    results = [inside[n] for n in root.operands] if root.opcode == "tuple" else [root]
    return moved + sum(_written(result, inside) for result in results)


def _read(at: Instruction, inside: Computation) -> int:
    """Return what the users of an instruction, a parameter or its bitcast, read."""
    read = 0
    for user in inside.values():
        if at.name not in user.operands or user.opcode in PASSED_ON:
            continue
        if user.opcode in SLICES:
            read += user.bytes
        elif user.opcode == "bitcast":
            read += _read(user, inside)
        elif user.opcode != "dynamic-update-slice" or user.operands[0] != at.name:
            read += at.bytes
    return read


def _written(result: Instruction, inside: Computation) -> int:
    while result.opcode == "bitcast":
        result = inside[result.operands[0]]
    if result.opcode in ("parameter", "custom-call", *COLLECTIVES):
        return 0
    if result.opcode == "dynamic-update-slice":
        return inside[result.operands[1]].bytes
    return result.hbm_bytes
