"""Everything that others would see waits for the mandate and the standby, in order."""

from __future__ import annotations

import pytest

from diloco_jax.coordinator.standby import gate
from diloco_jax.coordinator.standby.gate import Gate, GateFullError
from diloco_jax.coordinator.standby.unseated import Unseated
from diloco_jax.protocol.coordinator.events import Alert, Note, Persist, Tell
from diloco_jax.protocol.holding import Commit
from diloco_jax.protocol.messages import Refused
from diloco_jax.protocol.records import Finished, Skipped
from diloco_jax.protocol.values import Version

PERSIST = Persist(record=Finished())
NOTE = Note(record=Skipped(tick=1, fragment=0, why="quorum"))
TELL = Tell(session="s", message=Refused(code="c", message="m"))
COMMIT = Commit(fragment=0, version=Version(1, 1))
ALERT = Alert(text="t")


class Seat(Unseated):
    """Counts records, and lets be seen what a test says."""

    number = 0
    visible = 0

    @property
    def written(self) -> int:
        return self.number

    def may_show(self, number: int) -> bool:
        return number <= self.visible


@pytest.fixture
def seat() -> Seat:
    return Seat()


@pytest.fixture
def done() -> list[object]:
    return []


def made(seat: Seat, done: list[object]) -> Gate:
    def carry_out(effect: object) -> None:
        seat.number += isinstance(effect, Persist | Note)
        done.append(effect)

    return Gate(carry_out, seat)


def test_records_are_written_at_once_and_the_rest_waits(
    seat: Seat, done: list[object]
) -> None:
    gate = made(seat, done)
    for effect in (TELL, PERSIST, COMMIT, ALERT, TELL, PERSIST):
        gate.carry_out(effect)
    assert done == [TELL, PERSIST, ALERT, PERSIST]
    assert not gate.empty
    seat.visible = 1
    gate.when_shown(lambda: done.append("later"))
    assert done[4:] == [COMMIT, TELL]
    seat.visible = 2
    gate.flush()
    assert done[6:] == ["later"]
    assert gate.empty


def test_what_tells_of_a_line_of_the_tape_waits_for_it(
    seat: Seat, done: list[object]
) -> None:
    """An island forgets the facts of which it hears that they are recorded."""
    gate = made(seat, done)
    gate.carry_out(NOTE)
    gate.carry_out(TELL)
    assert done == [NOTE]
    seat.visible = 1
    gate.flush()
    assert done == [NOTE, TELL]


def test_what_needs_no_record_waits_for_the_mandate(
    seat: Seat, done: list[object]
) -> None:
    seat.visible = -1
    gate = made(seat, done)
    gate.carry_out(TELL)
    assert done == []
    seat.visible = 0
    gate.flush()
    assert done == [TELL]


def test_the_gate_does_not_grow_without_bound(
    seat: Seat, done: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MOST_WAITING", 3)
    seat.visible = -1
    closed = made(seat, done)
    for _ in range(3):
        closed.carry_out(TELL)
    with pytest.raises(GateFullError, match=r"object of placement\.mandate"):
        closed.carry_out(TELL)


def test_without_a_mandate_nothing_waits(done: list[object]) -> None:
    gate = Gate(done.append, Unseated())
    for effect in (PERSIST, TELL, COMMIT):
        gate.carry_out(effect)
    assert done == [PERSIST, TELL, COMMIT]
