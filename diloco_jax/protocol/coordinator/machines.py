"""The state machines of the coordinator's half: every legal move, as tables.

Rules of this file:

1. Phases and statuses change only by `StateMachine.move`. A move that is not in a table
   raises: it is a bug in this package, and no message of a peer can cause it.
2. A message that makes no move in the current state changes nothing. It is counted as
   `Ignored`. On a lossy wire some of these are usual: messages are repeated, or sent
   to a process that has been replaced. `EXPECTED` lists them, each with its reason.
   Any other shows that the two ends disagree.

A tick opens a fragment. The fragment closes when its merge begins, and commits when the
merge is computed and durable. A take is asked for; its record and its bytes arrive in
either order, and with both it is ready. docs/design/architecture.md draws the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Literal, NamedTuple, TypeVar

from diloco_jax.protocol.coordinator.events import Ignored
from diloco_jax.protocol.coordinator.state import Take

S = TypeVar("S", bound=str)


class IllegalMoveError(AssertionError):
    """A move that is in no table."""


class StateMachine(NamedTuple, Generic[S]):
    """The legal moves of one machine. moves: the state after each move, by state."""

    name: str
    moves: Mapping[S, Mapping[str, S]]

    def move(self, state: S, move: str) -> S:
        """Return the state after a move; IllegalMoveError if the move is not legal."""
        after = self.moves[state].get(move)
        if after is None:
            legal = ", ".join(self.moves[state]) or "nothing"
            raise IllegalMoveError(
                f"{self.name} in state {state!r}: no move {move!r}, only {legal}"
            )
        return after

    def check(self, before: S, move: str, after: S) -> None:
        """Raise IllegalMoveError unless the move leads from `before` to `after`."""
        if self.move(before, move) != after:
            raise IllegalMoveError(
                f"{self.name} in state {before!r}: {move!r} led to {after!r}, but must "
                f"lead to {self.move(before, move)!r}"
            )


FragmentState = Literal["idle", "open", "merging", "done"]
TakeState = Literal["none", "asked", "taken", "arrived", "ready", "refused"]
IslandState = Literal["unknown", "live", "absent", "gone"]
RunState = Literal["running", "stopping", "flushing", "done"]

FRAGMENT: StateMachine[FragmentState] = StateMachine(
    "fragment",
    {
        "idle": {
            "tick": "open",
            "flush": "done",
            "recover": "idle",
            "begin term": "idle",
        },
        "open": {"close": "merging", "give up": "idle", "recover": "idle"},
        "merging": {"commit": "idle", "recover": "idle"},
        "done": {"recover": "done", "extend": "idle", "begin term": "idle"},
    },
)

TAKE: StateMachine[TakeState] = StateMachine(
    "take",
    {
        "none": {"ask": "asked", "record": "taken"},
        "asked": {"record": "taken", "bytes": "arrived", "refuse": "refused"},
        "taken": {"bytes": "ready", "refuse": "refused", "give up": "none"},
        "arrived": {"record": "ready", "refuse": "refused", "lose": "asked"},
        "ready": {
            "merge": "none",
            "refuse": "refused",
            "give up": "none",
            "lose": "taken",
        },
        "refused": {"record": "refused", "bytes": "refused", "give up": "none"},
    },
)
"""Moves of a take. The end of its incarnation removes a take in any state, and leaves
it behind if it is ready. A record without a request belongs to a take that was asked
for before a crash."""

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
        "done": {"extend": "running"},
    },
)

MACHINES: tuple[StateMachine[str], ...] = (FRAGMENT, TAKE, ISLAND, RUN)  # type: ignore[assignment]

EXPECTED: Mapping[tuple[str, str, str], str] = {
    ("fragment", "away", "bytes"): "its worker died after it had told of them",
    ("fragment", "found", "anchor"): "another island was asked meanwhile",
    ("take", "none", "bytes"): "the verdict was sent while the bytes were on their way",
    ("take", "none", "give up"): "it was booked before a crash, or at a goodbye",
    ("take", "asked", "give up"): "it belongs to an earlier take",
    ("take", "taken", "record"): "a hello told it already, or it is repeated",
    ("take", "ready", "record"): "a hello told it already, or it is repeated",
    ("take", "arrived", "bytes"): "the bytes were asked for again, and came twice",
    ("take", "ready", "bytes"): "the bytes were asked for again, and came twice",
    ("take", "refused", "record"): "it is repeated",
    ("take", "judged", "record"): "the verdict was sent before the record came",
    ("take", "refused", "bytes"): "the bytes were asked for again, and came twice",
    ("take", "carried", "record"): "it belongs to a take in an earlier term",
    ("island", "gone", "bytes"): "they belong to an incarnation that has ended",
    ("island", "gone", "disconnect"): "the island said goodbye, then disconnected",
    ("island", "absent", "disconnect"): "the island was silent before",
    ("island", "replaced", "disconnect"): "a newer incarnation has joined",
    ("island", "replaced", "goodbye"): "a newer incarnation has joined",
    ("run", "done", "report"): "the run ended while the report was on its way",
}
"""Reason for each (machine, state, message) that usually makes no move."""


def take_state(take: Take | None) -> TakeState:
    """Return the state that the fields of an outstanding take describe."""
    if take is None:
        return "none"
    if take.refused:
        return "refused"
    if take.end is None:
        return "arrived" if take.arrived else "asked"
    return "ready" if take.arrived else "taken"


def ignored(machine: str, state: str, message: str) -> Ignored:
    """Return the effect for a message that makes no move in this state."""
    return Ignored(
        machine=machine,
        state=state,
        message=message,
        expected=(machine, state, message) in EXPECTED,
    )
