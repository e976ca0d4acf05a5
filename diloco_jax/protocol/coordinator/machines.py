"""The state machines of the coordinator's half: every legal move, as tables.

Rules of this file:

1. Phases and statuses change by `Machine.move` alone, so a move that is not in a table
   raises: it is a mistake in this package, and no message of a peer can cause it.
2. A message that comes in a state in which it makes no move changes nothing. It is
   named as `Ignored` and counted. On a lossy wire some of them are usual, since things
   are told twice, or told to a process that has been replaced: they are in `EXPECTED`,
   each with its reason. Any other says that the two ends disagree.

A fragment is opened by a tick, closed when its merge begins, and committed when that is
computed and durable. A take is asked for; its record and its bytes come in either
order, and with both it is ready. docs/design/architecture.md draws the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Literal, NamedTuple, TypeVar

from diloco_jax.protocol.coordinator.events import Ignored
from diloco_jax.protocol.coordinator.state import Take

S = TypeVar("S", bound=str)


class IllegalMoveError(AssertionError):
    """A move that no table has."""


class StateMachine(NamedTuple, Generic[S]):
    """moves: by state, the state that each move leads to."""

    name: str
    moves: Mapping[S, Mapping[str, S]]

    def move(self, state: S, move: str) -> S:
        """The state after a move; IllegalMoveError if there is none of that name."""
        after = self.moves[state].get(move)
        if after is None:
            legal = ", ".join(self.moves[state]) or "nothing"
            raise IllegalMoveError(
                f"{self.name} in state {state!r}: no move {move!r}, only {legal}"
            )
        return after

    def check(self, before: S, move: str, after: S) -> None:
        """IllegalMoveError unless the move leads from the one state to the other."""
        if self.move(before, move) != after:
            raise IllegalMoveError(
                f"{self.name} in state {before!r}: {move!r} led to {after!r}, it leads "
                f"to {self.move(before, move)!r}"
            )


FragmentState = Literal["idle", "open", "merging", "done"]
TakeState = Literal["none", "asked", "taken", "arrived", "ready", "refused"]
IslandState = Literal["unknown", "live", "absent", "gone"]
RunState = Literal["running", "stopping", "flushing", "done"]

FRAGMENT: StateMachine[FragmentState] = StateMachine(
    "fragment",
    {
        "idle": {"tick": "open", "flush": "done", "recover": "idle"},
        "open": {"close": "merging", "give up": "idle", "recover": "idle"},
        "merging": {"commit": "idle", "recover": "idle"},
        "done": {"recover": "done"},
    },
)

TAKE: StateMachine[TakeState] = StateMachine(
    "take",
    {
        "none": {"ask": "asked", "record": "taken"},
        "asked": {"record": "taken", "bytes": "arrived", "refuse": "refused"},
        "taken": {"bytes": "ready", "refuse": "refused", "give up": "none"},
        "arrived": {"record": "ready", "refuse": "refused"},
        "ready": {"merge": "none", "refuse": "refused", "give up": "none"},
        "refused": {"record": "refused", "bytes": "refused", "give up": "none"},
    },
)
"""With the end of its incarnation a take is gone from any state, left behind if it is
ready. A record without a request is of a take that was asked for before a crash."""

ISLAND: StateMachine[IslandState] = StateMachine(
    "island",
    {
        "unknown": {"join": "live"},
        "live": {"fall silent": "absent", "end": "gone", "recover": "absent"},
        "absent": {"be heard": "live", "end": "gone", "recover": "absent"},
        "gone": {"join": "live", "recover": "gone"},
    },
)

RUN: StateMachine[RunState] = StateMachine(
    "run",
    {
        "running": {"stop": "stopping"},
        "stopping": {"flush": "flushing", "recover": "stopping"},
        "flushing": {"finish": "done", "recover": "stopping"},
        "done": {},
    },
)

MACHINES: tuple[StateMachine[str], ...] = (FRAGMENT, TAKE, ISLAND, RUN)  # type: ignore[assignment]

EXPECTED: Mapping[tuple[str, str, str], str] = {
    ("take", "none", "bytes"): "its verdict was told while they were on their way",
    ("take", "none", "give up"): "it was told before a crash, or with a goodbye",
    ("take", "asked", "give up"): "it is of an earlier take",
    ("take", "taken", "record"): "a hello told it already, or it is told again",
    ("take", "ready", "record"): "likewise",
    ("take", "arrived", "bytes"): "they were asked for again, and came twice",
    ("take", "ready", "bytes"): "likewise",
    ("take", "refused", "record"): "it is told again",
    ("take", "judged", "record"): "its verdict was told before the record came",
    ("take", "refused", "bytes"): "they were asked for again, and came twice",
    ("take", "carried", "record"): "it is of a take in an earlier term",
    ("island", "gone", "bytes"): "they are of an incarnation that has ended",
    ("island", "gone", "disconnect"): "it said goodbye, and then hung up",
    ("island", "absent", "disconnect"): "it had been silent before",
    ("island", "replaced", "disconnect"): "a newer incarnation is in",
    ("island", "replaced", "goodbye"): "a newer incarnation is in",
    ("run", "done", "report"): "the run was over while it was on its way",
}
"""(machine, state, message) that makes no move, and why that happens."""


def take_state(take: Take | None) -> TakeState:
    """The state that the fields of an outstanding take add up to."""
    if take is None:
        return "none"
    if take.refused:
        return "refused"
    if take.end is None:
        return "arrived" if take.arrived else "asked"
    return "ready" if take.arrived else "taken"


def ignored(machine: str, state: str, message: str) -> Ignored:
    """Says that a message makes no move in this state."""
    return Ignored(
        machine=machine,
        state=state,
        message=message,
        expected=(machine, state, message) in EXPECTED,
    )
