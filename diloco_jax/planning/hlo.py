"""A compiled program's text as data: computations, loops, collectives, HBM traffic.

XLA prints an optimised program one instruction per line. A loop's body stands once; its
number of runs is the constant that its condition compares the counter with. On TPUs

  - an asynchronous all-gather is cut into fusions: a start, steps that hide it behind
    matrix products, and a done; all hold a copy of it under one channel id;
  - a collective that a SparseCore carries out is a computation of its own: call-start
    calls it, call-update gives it its operands and call-done awaits it;
  - a fusion of an all-reduce and a slice of its result is one operation, a
    reduce-scatter.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all"),
    *("collective-permute", "ragged-all-to-all", "collective-broadcast"),
)
NUMBERED = ("constant", "parameter")
BITS = re.compile(r"[a-z]+(\d+)")
ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\](?:\{([^{}]*)\})?")
COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\) -> .* \{$")
INSTRUCTION = re.compile(r"(ROOT )?%([\w.\-]+) = ")
NAME = re.compile(r"%([\w.\-]+)")
CALLED = re.compile(
    r"(calls|to_apply|body|condition|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
CHANNEL = re.compile(r"channel_id=(\d+)")
LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
IOTA_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
PARTITIONS = re.compile(r"num_partitions=(\d+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result."""

    bytes: int
    in_hbm: bool
    """False for an array in a chip's fast memory or in the host's."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: a line of the text."""

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    """Arrays of the result."""
    operands: tuple[str, ...]
    number: str
    """Value of a constant, or position of a parameter."""
    attributes: str
    root: bool

    @property
    def bytes(self) -> int:
        """Bytes of the result, wherever it lies."""
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> int:
        """Bytes of the result that lie in HBM."""
        return sum(array.bytes for array in self.arrays if array.in_hbm)

    def called(self, how: str) -> tuple[str, ...]:
        """Return the names of the computations that it calls in that way."""
        return tuple(
            name
            for kind, names in CALLED.findall(self.attributes)
            if kind == how
            for name in NAME.findall(names)
        )


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next(i for i in self.instructions.values() if i.root)


@dataclasses.dataclass(frozen=True)
class Program:
    """A whole compiled module."""

    computations: dict[str, Computation]
    entry: Computation
    partitions: int
    """Devices that the program is compiled for."""

    def executed(self) -> Iterator[tuple[Computation, int]]:
        """Yield every computation that runs by itself, with the number of its runs.

        These are the entry and the bodies of its loops. Fused computations are part of
        their caller.
        """
        yield from self._executed(self.entry, 1)

    def _executed(
        self, at: Computation, times: int
    ) -> Iterator[tuple[Computation, int]]:
        yield at, times
        for instruction in at.instructions.values():
            for body in instruction.called("body"):
                (condition,) = instruction.called("condition")
                rounds = trips(self.computations[condition])
                yield from self._executed(self.computations[body], times * rounds)
            for branch in instruction.called("branch_computations"):
                yield from self._executed(self.computations[branch], times)
            if instruction.opcode == "call":
                for callee in instruction.called("to_apply"):
                    yield from self._executed(self.computations[callee], times)

    def fused(self, at: Computation) -> Iterator[Computation]:
        """Yield the computation and all its parts, at any depth."""
        yield at
        for instruction in at.instructions.values():
            for name in instruction.called("calls"):
                yield from self.fused(self.computations[name])


def parse(text: str) -> Program:
    """Parse the text of `Compiled.as_text()`.

    Raises ValueError if the text has no entry.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    here: dict[str, Instruction] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            if head := COMPUTATION.match(line):
                here = {}
                made = Computation(head[2], here)
                computations[made.name] = made
                entry = made if head[1] else entry
            continue
        if found := INSTRUCTION.match(line.strip()):
            made_here = _instruction(line.strip(), found)
            here[made_here.name] = made_here
    if entry is None:
        raise ValueError(
            f"no ENTRY in {len(text)} characters: not the text of a compiled program"
        )
    partitions = PARTITIONS.search(text.partition("\n")[0])
    return Program(computations, entry, int(partitions[1]) if partitions else 1)


def trips(condition: Computation) -> int:
    """Return the iterations of a loop whose counter starts at 0 and goes up by 1.

    Raises ValueError if the condition has another form.
    """
    root, known = condition.root, condition.instructions
    if root.opcode == "compare" and "direction=LT" in root.attributes:
        for name in root.operands:
            if known[name].opcode == "constant":
                return int(known[name].number)
    raise ValueError(
        f"the loop condition {condition.name} ends in {root.opcode} "
        f"{root.attributes[:200]}; expected a comparison with a constant"
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


def _instruction(line: str, head: re.Match[str]) -> Instruction:
    rest = line[head.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing, opcode = _closing(rest, opening), rest[:opening]
    return Instruction(
        name=head[2],
        opcode=opcode,
        arrays=tuple(_arrays(result)),
        operands=tuple(NAME.findall(rest[opening:closing])),
        number=rest[opening + 1 : closing] if opcode in NUMBERED else "",
        attributes=rest[closing + 1 :],
        root=bool(head[1]),
    )


def _closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, start):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    raise ValueError(f"unbalanced parentheses in {text[:200]!r}")


def _arrays(result: str) -> Iterator[Array]:
    for dtype, extents, layout in ARRAY.findall(result):
        bits = BITS.match(dtype)
        size = math.prod(map(int, extents.split(","))) if extents else 1
        octets = size * (int(bits[1]) if bits else 8) // 8
        yield Array(octets, in_hbm="S(" not in layout)
