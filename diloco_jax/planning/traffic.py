"""Bytes that a compiled program moves between HBM and the chip.

An instruction reads its operands and writes its result, as far as they lie in HBM. A
fusion reads only what it uses: the slices of an operand that is only sliced, and
nothing of an operand that is updated in place. Data in fast memory costs nothing.
"""

from __future__ import annotations

from diloco_jax.planning.collectives import find_collectives
from diloco_jax.planning.hlo import COLLECTIVES, Computation, Instruction, Program

FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("while", "conditional", "call", "partition-id", "replica-id", "iota", "domain"),
    *("opt-barrier", "copy-done", "async-done", "slice-done"),
    # Given to a SparseCore: the work itself is counted where it is defined.
    *("call-start", "call-update", "call-done"),
    # One collective is many instructions: `find_collectives` sums them.
    *(f"{kind}{part}" for kind in COLLECTIVES for part in ("", "-start", "-done")),
}
SLICES = {"dynamic-slice", "slice", "gather"}
PASSED_ON = {"tuple", "custom-call", *COLLECTIVES}
"""Operations that pass their operands on: inside a fusion they are not counted."""


def hbm_bytes(program: Program) -> int:
    """Return the bytes that one chip reads and writes in one run, loops counted."""
    collectives = sum(c.times * c.moved_bytes for c in find_collectives(program))
    return collectives + sum(
        times * _moved(program, computation, instruction)
        for computation, times in program.executed()
        for instruction in computation.instructions.values()
    )


def _moved(program: Program, at: Computation, instruction: Instruction) -> int:
    opcode = instruction.opcode
    if opcode in FREE:
        return 0
    operands = [at.instructions[name] for name in instruction.operands]
    if opcode == "fusion":
        (callee,) = instruction.called("calls")
        return _fusion(program.computations[callee], operands)
    if opcode in SLICES:
        return 2 * instruction.hbm_bytes
    if opcode == "dynamic-update-slice":
        return 2 * operands[1].hbm_bytes
    if opcode in ("copy-start", "slice-start"):
        # The result names the source again.
        written = instruction.arrays[0]
        return written.bytes * (written.in_hbm + _first_in_hbm(operands))
    return instruction.hbm_bytes + sum(operand.hbm_bytes for operand in operands)


def _fusion(callee: Computation, operands: list[Instruction]) -> int:
    inside = callee.instructions
    moved = 0
    parameters = [i for i in inside.values() if i.opcode == "parameter"]
    parameters.sort(key=lambda i: int(i.number))
    for parameter, operand in zip(parameters, operands, strict=True):
        if not operand.hbm_bytes:
            continue
        users = [i for i in inside.values() if parameter.name in i.operands]
        moved += min(
            operand.hbm_bytes, sum(_read(parameter, user, inside) for user in users)
        )
    results = [callee.root]
    if callee.root.opcode == "tuple":
        results = [inside[name] for name in callee.root.operands]
    return moved + sum(_written(result, inside) for result in results)


def _read(
    parameter: Instruction, user: Instruction, inside: dict[str, Instruction]
) -> int:
    if user.opcode in SLICES:
        return user.bytes
    if user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
        return 0
    if user.opcode == "bitcast":
        again = [i for i in inside.values() if user.name in i.operands]
        return sum(_read(user, one, inside) for one in again)
    return 0 if user.opcode in PASSED_ON else parameter.bytes


def _written(result: Instruction, inside: dict[str, Instruction]) -> int:
    while result.opcode == "bitcast":
        result = inside[result.operands[0]]
    if result.opcode in ("parameter", "custom-call", *COLLECTIVES):
        return 0
    if result.opcode == "dynamic-update-slice":
        return inside[result.operands[1]].bytes
    return result.hbm_bytes


def _first_in_hbm(operands: list[Instruction]) -> bool:
    return bool(operands and operands[0].hbm_bytes)
