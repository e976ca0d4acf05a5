"""State machines: moves go by the tables, and what makes no move is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit import joined

from diloco_jax.protocol.coordinator.state import (
    EXPECTED,
    FRAGMENT,
    MACHINES,
    TAKE,
    Disconnected,
    IllegalMoveError,
    Said,
    StateMachine,
)
from diloco_jax.protocol.messages import Goodbye

PAGE = Path(__file__).parents[3] / "docs" / "design" / "architecture.md"


def test_a_move_that_no_table_has_is_a_mistake() -> None:
    assert FRAGMENT.move("idle", "tick") == "open"
    with pytest.raises(IllegalMoveError, match=r"'idle': no move 'commit', only tick"):
        FRAGMENT.move("idle", "commit")
    with pytest.raises(
        IllegalMoveError, match="'bytes' led to 'taken', but must lead to"
    ):
        TAKE.check("asked", "bytes", "taken")


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_every_state_can_be_reached(machine: StateMachine[str]) -> None:
    first, *others = machine.moves
    reached, found = {first}, {first}
    while found:
        found = {s for f in found for s in machine.moves[f].values()} - reached
        reached |= found
    assert reached == {first, *others}


def test_what_a_lossy_wire_brings_is_expected_and_anything_else_is_not() -> None:
    d = joined("a")
    d.play("a=2 a/0=2")
    d.arrive("a", 0, 1)
    assert [(i.state, i.message) for i in d.ignored] == [("ready", "bytes")]
    assert d.ignored[0].expected
    d.computed(0)
    before = d.state
    d.computed(0)
    assert d.state == before
    assert (d.ignored[-1].machine, d.ignored[-1].expected) == ("fragment", False)


def test_what_comes_for_those_that_are_gone_is_counted() -> None:
    d = joined("a", "b")
    d.arrive("a", 0, 7)
    d.hello("a", 2, session="again")
    late = Goodbye(reason="stopped", text="bye")
    d.feed(Said(island="a", session="a1", message=late))
    d.feed(Disconnected(island="a", session="a1"))
    d.goodbye("b")
    d.arrive("b", 0, 7)
    d.disconnect("b")
    assert [(i.machine, i.state, i.message) for i in d.ignored] == [
        ("take", "none", "bytes"),
        ("island", "replaced", "goodbye"),
        ("island", "replaced", "disconnect"),
        ("island", "gone", "bytes"),
        ("island", "gone", "disconnect"),
    ]
    assert all(i.expected for i in d.ignored)
    assert all(EXPECTED.values()), "each has its reason"


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_the_drawings_are_the_tables(machine: StateMachine[str]) -> None:
    page = PAGE.read_text()
    start = page.index(f"<!-- machine: {machine.name} -->")
    drawing = page[start : page.index("```\n", page.index("stateDiagram", start))]
    arrows = re.findall(r"^ *(\w+) --> (\w+): ([\w ]+)$", drawing, re.MULTILINE)
    drawn = {(before, move.strip(), after) for before, after, move in arrows}
    assert drawn == {
        (before, move, after)
        for before, moves in machine.moves.items()
        for move, after in moves.items()
    }
