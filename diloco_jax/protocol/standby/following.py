"""The standby's half: follow the primary, look at the mandate, take over when it ends.

The standby counts from the moment at which it saw a generation of the mandate for the
first time. The holder counts from before it asked for that generation, so its own count
is over first. The write that takes the mandate names the generation that was seen: if
the primary renewed it meanwhile, the write is refused.

From the moment of that write the standby answers nothing. So nothing that the primary
writes later can be visible as long as the mandate calls this standby in step.

What the mandate says of a node is about its disk. If a node comes back without a run on
its disk, it has no right to its log, neither as the holder nor as the standby in step.
A holder whose disk is broken has ceded the mandate, and has none either.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
from msgspec.structs import replace

from diloco_jax.protocol.coordinator.events import Timer
from diloco_jax.protocol.standby.events import (
    AnswerPrimary,
    Copied,
    Dial,
    Following,
    FromStore,
    HangUp,
    MandateRead,
    MandateWritten,
    PrimaryHeard,
    PrimaryLost,
    ReadMandate,
    Retire,
    StandbyEffect,
    StandbyEvent,
    StoreSilent,
    TakeOver,
    WriteMandate,
    WriteRefused,
)
from diloco_jax.protocol.standby.machines import STANDBY, StandbyState
from diloco_jax.protocol.standby.mandate import (
    NO_GENERATION,
    Mandate,
    MandateTiming,
)

LISTENING = ("dialled", "copying", "following")
"""States with a stream to the primary."""


class Standby(msgspec.Struct, frozen=True, kw_only=True):
    """State of the standby."""

    timing: MandateTiming
    node: str
    phase: StandbyState = "apart"
    generation: str = NO_GENERATION
    mandate: Mandate | None = None
    """The object as it was last read."""
    since: float = math.inf
    """When this generation was seen for the first time."""
    asked: Literal["", "read", "write"] = ""
    doubtful: bool = False
    """A write of this node may have been done: the next request is a read."""
    next_at: float = -math.inf
    """Time of the next look at the object."""
    dial_at: float = -math.inf
    heard_at: float = -math.inf
    """When the primary gave the last sign of life, or was dialled."""
    have: int = -1
    """Number of the last record that is durable here."""
    empty: bool = False
    """The disk holds no run, or a part of a copy: what the mandate says of it is about
    a disk that is lost."""
    led: int = 0
    """See `primary.seek`. A mandate that was made anew may be at an earlier reign."""


Step = tuple[Standby, list[StandbyEffect]]


def begin(timing: MandateTiming, node: str, *, empty: bool, led: int = 0) -> Standby:
    """Return the state of a standby that has heard of nobody yet. empty: its disk holds
    no run. led: see `primary.seek`."""
    return Standby(timing=timing, node=node, empty=empty, led=led)


def step(state: Standby, event: StandbyEvent, now: float) -> Step:
    """Apply one event at time `now`, in seconds of a clock that never stops."""
    effects: list[StandbyEffect] = []
    if state.phase == "over":
        return state, effects
    match event:
        case MandateRead() | MandateWritten() | WriteRefused() | StoreSilent():
            state, effects = _told_by_store(state, event, now)
        case Following() if state.phase == "dialled":
            phase = STANDBY.move(state.phase, "be accepted")
            state = replace(state, phase=phase, heard_at=now, empty=True)
        case Copied(number=number) if state.phase == "copying":
            phase = STANDBY.move(state.phase, "finish")
            state = replace(state, phase=phase, have=number, heard_at=now, empty=False)
            effects = [AnswerPrimary(number=number)]
        case PrimaryHeard(number=number) if state.phase in ("copying", "following"):
            have = max(state.have, number) if state.phase == "following" else -1
            state = replace(state, have=have, heard_at=now)
            effects = [AnswerPrimary(number=have)]
        case PrimaryLost():
            state = _lost(state, now)
        case Timer():
            pass
    state, found = _advance(state, now)
    return state, [*effects, *found]


def next_deadline(state: Standby, now: float) -> float:
    """Return the next time at which time alone changes something. `now` is the time of
    the last step, which handled everything due until then."""
    if state.phase == "over":
        return math.inf
    times = [math.inf]
    if not state.asked:
        times.append(state.next_at)
        if state.phase != "claiming":
            times.append(_claims_at(state))
    if _may_dial(state):
        times.append(state.dial_at)
    if state.phase in LISTENING:
        times.append(state.heard_at + state.timing.patience_s)
    return min(at for at in times if at > now)


def in_step(state: Standby) -> bool:
    """Tell if the mandate, as last seen, says that this disk has everything that is
    visible."""
    mandate = state.mandate
    return mandate is not None and mandate.in_step == state.node and not state.empty


def _claims_at(state: Standby) -> float:
    """Return the time at which the mandate counts as expired."""
    if state.mandate is None:
        return math.inf  # Nobody has led yet.
    timing = state.timing
    if in_step(state):
        return state.since + (0.0 if state.mandate.ceded else timing.expiry_s)
    return state.since + timing.gathering_s


def _told_by_store(state: Standby, event: FromStore, now: float) -> Step:
    asked, state = state.asked, replace(state, asked="")
    match event:
        case StoreSilent():
            again_at = now + state.timing.renew_s / 4
            return replace(state, doubtful=True, next_at=again_at), []
        case WriteRefused() if asked == "write":
            return _fail(state, now), []
        case MandateWritten() if asked == "write":
            return _lead(state, "log" if in_step(state) else "gathering")
        case MandateRead() if asked == "read":
            return _read(replace(state, doubtful=False), event, now)
    return state, []


def _fail(state: Standby, now: float) -> Standby:
    """Go back: the mandate was renewed. Nothing counts until it is read again."""
    phase = STANDBY.move(state.phase, "fail")
    return replace(
        state,
        phase=phase,
        generation=NO_GENERATION,
        mandate=None,
        since=math.inf,
        next_at=now,
        dial_at=now,
    )


def _read(state: Standby, event: MandateRead, now: float) -> Step:
    mandate = event.mandate
    state = replace(state, next_at=now + state.timing.renew_s)
    if event.generation != state.generation:
        if state.phase == "claiming":
            state = replace(_fail(state, now), next_at=now + state.timing.renew_s)
        state = replace(state, generation=event.generation, mandate=mandate, since=now)
    elif state.phase == "claiming":
        # The write was not done. If it comes late, the next one is refused.
        return replace(state, next_at=now), []
    if mandate is None:
        return state, []
    counts = not (state.empty or mandate.ceded)
    if mandate.holder == state.node and (mandate.gathers or counts):
        # By a write that was in doubt, or before this process was started again.
        state = replace(state, phase=STANDBY.move(state.phase, "claim"))
        return _lead(state, "gathering" if mandate.gathers else "log")
    if mandate.over:
        phase = STANDBY.move(state.phase, "retire")
        return replace(state, phase=phase), [HangUp(), Retire()]
    return state, []


def _lead(state: Standby, by: Literal["log", "gathering"]) -> Step:
    state = replace(state, phase=STANDBY.move(state.phase, "take over"))
    return state, [HangUp(), TakeOver(by=by)]


def _lost(state: Standby, now: float) -> Standby:
    if state.phase not in LISTENING:
        return state
    phase = STANDBY.move(state.phase, "lose")
    # Not at once: a primary that turned it away does so again.
    return replace(state, phase=phase, dial_at=now + state.timing.renew_s / 4)


def _advance(state: Standby, now: float) -> Step:
    """Do what is due: take the mandate, look at it, dial the primary."""
    if state.phase == "over":
        return state, []
    effects: list[StandbyEffect] = []
    if not state.asked and state.phase != "claiming" and now >= _claims_at(state):
        phase = STANDBY.move(state.phase, "claim")
        state, effects = replace(state, phase=phase), [HangUp()]
        state = replace(state, next_at=now)
    if not state.asked and now >= state.next_at:
        state, asked = _ask(state)
        effects.append(asked)
    if state.phase in LISTENING and now >= state.heard_at + state.timing.patience_s:
        state = _lost(state, now)
        effects.append(HangUp())
    if _may_dial(state) and now >= state.dial_at:
        phase = STANDBY.move(state.phase, "dial")
        state = replace(state, phase=phase, heard_at=now)
        effects.append(Dial())
    return state, effects


def _may_dial(state: Standby) -> bool:
    """Tell if another node may lead. Before the mandate was read, it may name this one:
    a copy of what another one still has would take the place of the state that counts.
    """
    mandate = state.mandate
    known = mandate is not None and mandate.holder != state.node
    return state.phase == "apart" and known


def _ask(state: Standby) -> tuple[Standby, StandbyEffect]:
    if state.phase != "claiming" or state.doubtful:
        return replace(state, asked="read"), ReadMandate()
    assert state.mandate is not None
    mine = Mandate(
        run_id=state.mandate.run_id,
        holder=state.node,
        reign=max(state.mandate.reign, state.led) + 1,
        gathers=not in_step(state),
    )
    return replace(state, asked="write"), WriteMandate(
        mandate=mine, generation=state.generation
    )
