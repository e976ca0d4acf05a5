"""The primary's half: hold the mandate, and let nothing be seen too early.

Two rules keep a take-over from undoing anything:

1. What a record tells is visible once the record is durable, which includes the standby
   while the mandate may call it in step (`machines.GATED`).
2. Nothing is visible unless the mandate is valid by this node's clock.

So a standby is named in the mandate only after it has answered for everything visible.
If it is lost, the mandate says so before the primary goes on without it. A primary
whose mandate has run out shows nothing, and goes on once it has renewed it; islands
look elsewhere meanwhile. It steps down once it reads that another node holds it.

A primary that starts again lets the mandate name its standby until its state is loaded:
it has shown nothing, so if it dies meanwhile the standby still has everything.

A primary whose disk breaks cedes the mandate to the standby that has everything, if
there is one. From then on it shows nothing, so that stays true of the standby, whether
it is heard or not.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from diloco_jax.protocol.coordinator.events import Alert, Timer
from diloco_jax.protocol.standby.events import (
    Accept,
    DiskBroken,
    Dismiss,
    FromStore,
    Lapse,
    MandateRead,
    MandateWritten,
    PrimaryEffect,
    PrimaryEvent,
    ReadMandate,
    RecordWritten,
    Reign,
    Release,
    RunFinished,
    StandbyAnswered,
    StandbyAttached,
    StandbyLost,
    StateGathered,
    StateLoaded,
    StepDown,
    StoreSilent,
    WriteMandate,
    WriteRefused,
)
from diloco_jax.protocol.standby.machines import (
    FOLLOWED,
    GATED,
    PRIMARY,
)
from diloco_jax.protocol.standby.mandate import (
    Mandate,
    MandateTiming,
)
from diloco_jax.protocol.standby.primary_state import Primary, Request

NEAR = 64
"""Records by which a standby may lag when the primary begins to wait for it."""

NAMES = ("seeking", "loading", "naming", "in_step")
"""States in which the mandate is to name the standby, if there is one."""

CEDING = ("loading", "naming", "in_step")
"""States in which a standby has all that is visible, and is to be named."""


Step = tuple[Primary, list[PrimaryEffect]]


def seek(
    timing: MandateTiming,
    node: str,
    run_id: str,
    life: str,
    copied: str = "",
    led: int = 0,
) -> Primary:
    """Return the state of a node that wants to lead a run that it has on its disk.

    led: the last reign of this disk whose leads have numbers, which goes on if there is
    no mandate; 0: there is none.
    """
    return Primary(
        timing=timing,
        node=node,
        run_id=run_id,
        life=life,
        copied=copied,
        reign=max(1, led),
    )


def step(state: Primary, event: PrimaryEvent, now: float) -> Step:
    """Apply one event at time `now`, in seconds of a clock that never stops."""
    effects: list[PrimaryEffect] = []
    if state.phase == "over":
        return state, effects
    match event:
        case MandateRead() | MandateWritten() | WriteRefused() | StoreSilent():
            state, effects = _told_by_store(state, event, now)
        case RecordWritten(number=number):
            behind = min(state.behind_since, now)
            state = replace(state, written=number, behind_since=behind)
        case StandbyAttached(node=node):
            state, effects = _attached(state, node, now)
        case StandbyAnswered(number=number):
            state = _answered(state, number, now)
        case StandbyLost():
            state, effects = _lost(state, "its stream ended")
        case DiskBroken() if state.phase in CEDING and not state.finished:
            state = replace(state, cedes=True, next_at=-math.inf)
        case StateLoaded() if state.phase == "loading" and not state.cedes:
            phase = PRIMARY.move("loading", "show")
            state = replace(state, phase=phase, next_at=-math.inf)
        case StateGathered():
            state = replace(state, gathers=False)
        case RunFinished():
            state = replace(state, finished=True, next_at=-math.inf)
        case Timer():
            pass
    state, found = _advance(state, now)
    return state, [*effects, *found]


def may_show(state: Primary, number: int, now: float) -> bool:
    """Tell if what the records up to this one tell may be seen now."""
    shows = now < state.valid_until and not state.cedes
    return shows and number <= state.visible


def next_deadline(state: Primary, now: float) -> float:
    """Return the next time at which time alone changes something. `now` is the time of
    the last step, which handled everything due until then."""
    times = [math.inf]
    if state.phase == "over":
        return math.inf
    if state.request is None:
        times.append(state.next_at)
    if _is_followed(state):
        times.append(_patience_ends(state))
    if _leads(state) and not state.lapsed:
        times.append(state.valid_until)
    return min(at for at in times if at > now)


def _told_by_store(state: Primary, event: FromStore, now: float) -> Step:
    asked = state.request
    if asked is None:
        return state, []
    state = replace(state, request=None)
    match event:
        case StoreSilent():
            # It may have been written. Only a read tells the generation.
            return _again(state, now + state.timing.renew_s / 4), []
        case WriteRefused():
            return _again(state, now), []
        case MandateRead(generation=generation, mandate=mandate):
            return _read(state, generation, mandate, now)
        case MandateWritten(generation=generation):
            state = replace(
                state,
                generation=generation,
                write_next=True,
                valid_until=asked.at + state.timing.valid_s,
                lapsed=False,
            )
            if asked.mandate is not None and asked.mandate.ceded:
                return _step_down(state, _ceded(asked.mandate), follows=True)
            state, effects = _confirmed(state, asked)
            over = asked.mandate is not None and asked.mandate.over
            state = replace(state, told_over=over)
            said = asked.mandate == _mandate(state)
            next_at = asked.at + state.timing.renew_s if said else now
            return replace(state, next_at=next_at), effects


def _again(state: Primary, at: float) -> Primary:
    return replace(state, write_next=False, next_at=at)


def _read(state: Primary, generation: str, mandate: Mandate | None, now: float) -> Step:
    if mandate is None:
        if state.phase != "seeking":
            return _step_down(
                state,
                "the object of the mandate was removed while this coordinator led; "
                "start it again, and see who removes it",
            )
        mandate = _mandate(state)
    others = mandate.life != state.life
    if mandate.holder == state.node and state.copied and others:
        return _step_down(state, state.copied)
    if mandate.run_id != state.run_id:
        return _step_down(
            state,
            f"the mandate is for run {mandate.run_id}, the workdir holds run "
            f"{state.run_id}; give each run a mandate of its own (placement.mandate)",
        )
    if mandate.holder != state.node:
        return _step_down(
            state,
            f"node {mandate.holder} holds the mandate in reign {mandate.reign}, this "
            f"is node {state.node} of reign {state.reign}; what was merged there is "
            f"not in this workdir. Start this coordinator as the standby of that one",
            follows=True,
        )
    if state.phase != "seeking" and others:
        return _step_down(
            state,
            f"another process leads as node {state.node}: its workdir is a copy of "
            f"this one. Keep one of them, and remove the file of the node's name from "
            f"the other",
        )
    if mandate.ceded:
        return _step_down(state, _ceded(mandate), follows=True)
    state = replace(
        state,
        generation=generation,
        reign=mandate.reign,
        write_next=True,
        next_at=now,
    )
    if state.phase == "seeking":
        state = replace(state, gathers=mandate.gathers, standby=mandate.in_step)
    return state, []


def _ceded(mandate: Mandate) -> str:
    return (
        f"node {mandate.holder} has a broken disk, and has ceded the mandate to "
        f"node {mandate.in_step}, which has everything; start this coordinator as the "
        f"standby of that one"
    )


def _confirmed(state: Primary, asked: Request) -> Step:
    """Move on after a write: the mandate says what was asked for."""
    if state.phase == "seeking":
        if state.standby:
            # What was written before this life may be more than the standby has.
            state = replace(state, answered=-1, visible=-1)
        move = "resume" if state.standby else "win"
        state = replace(state, phase=PRIMARY.move("seeking", move), copied="")
        return state, [Reign(number=state.reign, gathers=state.gathers)]
    named = asked.mandate is not None and bool(asked.mandate.in_step)
    if state.phase == "naming" and named:
        return replace(state, phase=PRIMARY.move("naming", "confirm")), []
    if state.phase == "parting" and not named:
        phase = PRIMARY.move("parting", "confirm")
        return replace(state, phase=phase, standby=""), []
    return state, []


def _attached(state: Primary, node: str, now: float) -> Step:
    if node == state.node:
        return state, [Dismiss(reason=f"node {node} is this coordinator itself")]
    if state.phase != "alone" or state.gathers:
        # The mandate may still speak of its disk, or this one has nothing to copy.
        what = "gathering" if state.gathers else state.phase
        reason = f"the primary is {what}; come again"
        return state, [Dismiss(reason=reason)]
    state = replace(
        state,
        phase=PRIMARY.move("alone", "attach"),
        standby=node,
        answered=-1,
        heard_at=now,
        behind_since=math.inf,
    )
    return state, [Accept(node=node)]


def _answered(state: Primary, number: int, now: float) -> Primary:
    if state.phase not in FOLLOWED:
        return state
    answered = max(state.answered, min(number, state.written))
    behind = state.behind_since
    if answered > state.answered:
        behind = now if answered < state.written else math.inf
    return replace(state, answered=answered, heard_at=now, behind_since=behind)


def _lost(state: Primary, why: str) -> Step:
    if not _is_followed(state):
        return state, []
    phase = PRIMARY.move(state.phase, "lose")
    standby = state.standby if phase == "parting" else ""
    effects: list[PrimaryEffect] = [Dismiss(reason=f"the standby is lost: {why}")]
    if state.phase == "in_step":
        text = (
            f"standby {state.standby} is not in step any more ({why}): until one is, "
            f"what no island has adopted is lost with this coordinator's machine"
        )
        effects.append(Alert(text=text))
    state = replace(state, phase=phase, standby=standby, next_at=-math.inf)
    return state, effects


def _step_down(state: Primary, reason: str, *, follows: bool = False) -> Step:
    phase = PRIMARY.move(state.phase, "step down")
    state = replace(state, phase=phase, standby="", valid_until=-math.inf)
    return state, [StepDown(reason=reason, follows=follows)]


def _is_followed(state: Primary) -> bool:
    """Tell if a standby that is lost has to be parted from."""
    return state.phase in FOLLOWED and not state.cedes


def _patience_ends(state: Primary) -> float:
    """Return the time at which the standby counts as lost unless it is heard."""
    waits = state.behind_since if state.phase in GATED else math.inf
    timing = state.timing
    return min(state.heard_at + timing.patience_s, waits + timing.stall_s)


def _advance(state: Primary, now: float) -> Step:
    """Do what is due: give up the standby, name it, renew the mandate, let things be
    seen."""
    effects: list[PrimaryEffect] = []
    if state.phase == "over":
        return state, effects
    if _is_followed(state) and now >= _patience_ends(state):
        state, effects = _lost(state, "it was silent, or too slow, for too long")
    near = state.answered >= 0 and state.written - state.answered <= NEAR
    if state.phase == "copying" and near:
        phase = PRIMARY.move("copying", "come near")
        behind = now if state.answered < state.written else math.inf
        state = replace(state, phase=phase, behind_since=behind)
    if state.phase == "proving" and state.answered >= state.visible:
        state = replace(
            state, phase=PRIMARY.move("proving", "catch up"), next_at=-math.inf
        )
    if _leads(state) and not state.lapsed and now >= state.valid_until:
        state = replace(state, lapsed=True)
        effects.append(Lapse())
    state, asked = _ask(state, now)
    state, shown = _show(state, now)
    return state, [*effects, *asked, *shown]


def _leads(state: Primary) -> bool:
    return state.phase not in ("seeking", "over")


def _ask(state: Primary, now: float) -> Step:
    """Make the request that is due, if none is under way."""
    if state.request is not None or now < state.next_at:
        return state, []
    if not state.write_next:
        return replace(state, request=Request(at=now)), [ReadMandate()]
    mandate = _mandate(state)
    state = replace(state, request=Request(at=now, mandate=mandate))
    return state, [WriteMandate(mandate=mandate, generation=state.generation)]


def _mandate(state: Primary) -> Mandate:
    """Return what the mandate has to say in this state."""
    return Mandate(
        run_id=state.run_id,
        holder=state.node,
        reign=state.reign,
        in_step=state.standby if state.phase in NAMES else "",
        gathers=state.gathers,
        over=state.finished,
        ceded=state.cedes,
        life=state.life,
    )


def _show(state: Primary, now: float) -> Step:
    """Let be seen what may be seen."""
    if state.phase == "seeking" or state.cedes or now >= state.valid_until:
        return state, []
    through = state.written
    if state.phase in GATED:
        through = min(state.answered, state.written)
    if through <= state.visible:
        return state, []
    return replace(state, visible=through), [Release(through=through)]
