"""Bytes that a compiled program sends between chips, and moves between chip and HBM.

Both are read from the program's text, of which XLA prints one instruction per line.
`Compiled.cost_analysis()` does not serve: it counts the body of a loop once, and arrays
in fast memory as if they lay in HBM. A loop runs as often as the constant says that its
condition compares the counter with. On TPUs

  - an asynchronous all-gather is cut into fusions, which all hold a copy of it under
    one channel id;
  - a collective that a SparseCore carries out is a computation of its own, called by
    call-start;
  - a fusion of an all-reduce and a slice of its result is a reduce-scatter.

Sent are the bytes of one chip in a group of n chips: (n - 1) / n of the result of an
all-gather, or of the input of a reduce-scatter or an all-to-all; twice that for an
all-reduce. Of a ragged all-to-all it is that part of the rows that a chip has if all
have as many: how many go where, no text says. Its larger array has room for n times as
many (`models/experts.py`). Moved is what an instruction reads and writes, as far as it
lies in HBM. A fusion reads only what it uses: the slices of an operand that is only
sliced, and nothing of an operand that is updated in place.
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
SLICES = ("dynamic-slice", "slice", "gather")
IN_PLACE = "dynamic-update-slice"
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
ARRAY = re.compile(r"([a-z]+(\d*)\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r" +(ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)")
NAME = re.compile(r"%([\w.\-]+)")
CHANNEL = re.compile(r"channel_id=\d+")
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
        found = re.findall(rf"{how}=\{{?((?:%[\w.\-]+(?:, )?)+)", self.attributes)
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

    def parts(self, name: str) -> Iterator[tuple[Computation, bool]]:
        """Yield the computation and all that runs as part of it, and whether that is
        asynchronous: fusions at any depth, and the work of SparseCores."""
        own = self.computations[name]
        yield own, any(ASYNC_FUSION in one.attributes for one in own.values())
        for instruction in own.values():
            for part in instruction.called("calls"):
                yield from self.parts(part)
            if instruction.opcode == "call-start":
                for callee in instruction.called("to_apply"):
                    yield from ((part, True) for part, _ in self.parts(callee))

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
    """Runs that are asynchronous: they are started and awaited apart."""
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
        if head := COMPUTATION.match(line):
            here = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif found := INSTRUCTION.match(line):
            root, name, result, opcode, inside, attributes = found.groups()
            arrays = tuple(map(_array, ARRAY.finditer(result)))
            here[name] = Instruction(
                name, opcode, arrays, inside, attributes, bool(root)
            )
    if not entry:
        raise ValueError(
            f"no ENTRY in {len(text)} characters: not the text of a compiled program"
        )
    partitions = PARTITIONS.search(text.partition("\n")[0])
    return Program(computations, entry, int(partitions[1]) if partitions else 1)


def _array(found: re.Match[str]) -> tuple[int, bool]:
    _, bits, extents, layout = found.groups(default="")
    elements = math.prod(map(int, filter(None, extents.split(","))))
    return elements * int(bits or 8) // 8, "S(" not in layout


def _root(computation: Computation) -> Instruction:
    return next(i for i in computation.values() if i.root)


# ---- between chips ------------------------------------------------------------------


def find_collectives(program: Program) -> list[CollectiveSum]:
    """Return the collectives of a program, each once, whatever its instructions."""
    found: dict[tuple[str, str], CollectiveSum] = {}
    for name, times in program.executed():
        for part, hidden in program.parts(name):
            for instruction in part.values():
                kind = instruction.opcode.removesuffix("-start")
                if kind not in COLLECTIVES:
                    continue
                overlaps = hidden or kind != instruction.opcode
                if kind == "all-reduce" and _root(part).opcode == "dynamic-slice":
                    kind = "reduce-scatter"
                channel = CHANNEL.search(instruction.attributes)
                # Outside of fusions each is one, though those of all shard_maps share a
                # channel. In them, one channel may carry operations of two kinds.
                fused = part is not program.computations[name]
                own = f"{id(part)} {instruction.name}"
                key = channel[0] if channel and fused else own, kind
                known = found.get(key)
                count = max(times, known.count if known else 0)
                overlaps = overlaps or bool(known and known.overlapping)
                group = group_size(instruction.attributes, program.partitions)
                sent, moved = _sent_and_moved(kind, instruction, group, part)
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


def _sent_and_moved(
    kind: str, instruction: Instruction, group: int, at: Computation
) -> tuple[int, int]:
    whole = instruction.bytes  # Of the group's whole array, counted once.
    if kind == "ragged-all-to-all":
        whole = max(whole, at[instruction.operands[0]].bytes) // group
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


# ---- between a chip and its HBM -----------------------------------------------------


def hbm_bytes(program: Program) -> int:
    """Return the bytes that one chip reads and writes in one run, loops counted."""
    return sum(c.moved_bytes for c in find_collectives(program)) + sum(
        times * _moved(program, program.computations[name], instruction)
        for name, times in program.executed()
        for instruction in program.computations[name].values()
    )


def _moved(program: Program, at: Computation, instruction: Instruction) -> int:
    if instruction.opcode in FREE:
        return 0
    operands = [at[name] for name in instruction.operands]
    if instruction.opcode in ("copy-start", "slice-start"):
        # The result names the source again.
        octets, in_hbm = instruction.arrays[0]
        return octets * (in_hbm + bool(operands and operands[0].hbm_bytes))
    if instruction.opcode != "fusion":
        used = [_used(operand, instruction) for operand in operands]
        written = _written(instruction, at)
    else:
        (callee,) = instruction.called("calls")
        inside = program.computations[callee]
        parameters = [i for i in inside.values() if i.opcode == "parameter"]
        parameters.sort(key=lambda parameter: int(parameter.inside))
        used = [_read(parameter, inside) for parameter in parameters]
        root = _root(inside)
        results = [inside[n] for n in root.operands] if root.opcode == "tuple" else []
        written = sum(
            _written(result, inside)
            for result in (_unwrapped(r, inside) for r in results or [root])
            if result.opcode not in ("parameter", *PASSED_ON)
        )
    pairs = zip(operands, used, strict=True)
    return written + sum(min(operand.hbm_bytes, read) for operand, read in pairs)


def _read(at: Instruction, inside: Computation) -> int:
    """Return what a fusion reads of an instruction, a parameter or its bitcast."""
    users = [
        user
        for user in inside.values()
        if at.name in user.operands and user.opcode not in PASSED_ON
    ]
    return sum(
        _read(user, inside) if user.opcode == "bitcast" else _used(at, user)
        for user in users
    )


def _used(operand: Instruction, user: Instruction) -> int:
    """Return the bytes of an operand that an instruction reads."""
    if user.opcode in SLICES:
        return user.bytes
    updated = user.opcode == IN_PLACE and user.operands[0] == operand.name
    return 0 if updated else operand.bytes


def _written(result: Instruction, at: Computation) -> int:
    if result.opcode == IN_PLACE:
        return at[result.operands[1]].bytes
    return result.hbm_bytes


def _unwrapped(result: Instruction, inside: Computation) -> Instruction:
    """Return what a result is a bitcast of."""
    while result.opcode == "bitcast":
        result = inside[result.operands[0]]
    return result
