"""The start of a run whose first parameters one island gives: until they are complete,
no other island is let in, and nothing of the run is visible.

waiting -> fetching -> over, with the state and events of `gathering.py`. The island is
welcomed without versions, which asks it to begin with parameters of its own. Each of
its fragments is then asked for as an anchor, one after another. If it starts again, all
of them come anew: another attempt may have other values.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from diloco_jax.protocol.coordinator.events import Disconnected, Said, Tell
from diloco_jax.protocol.coordinator.gathering import (
    AnchorArrived,
    AwaitedAnchor,
    Discard,
    Effect,
    Event,
    Gathering,
    GiveUp,
    Got,
    Offered,
    Offering,
    Open,
    Postpone,
    Step,
    alive,
)
from diloco_jax.protocol.coordinator.state import PolicyConfig
from diloco_jax.protocol.messages import AnchorRequest, Hello, Refused, Welcome
from diloco_jax.protocol.values import FIRST_VERSION


def begin(config: PolicyConfig, names: frozenset[str], now: float) -> Gathering:
    """Return the state that waits for the island that gives the parameters."""
    return Gathering(names=names, deadline=now + config.compile_budget_s)


def step(config: PolicyConfig, state: Gathering, event: Event, now: float) -> Step:
    """Apply one event at time `now` (monotonic seconds)."""
    effects: list[Effect] = []
    match event:
        case Offered():
            state, effects = _offered(config, state, event, now)
        case Said():
            state = alive(config, state, event, now, connected=True)
        case Disconnected():
            state = alive(config, state, event, now, connected=False)
        case AnchorArrived():
            state = _arrived(state, event)
    state, moved = _advance(config, state, now)
    return state, effects + moved


def next_deadline(state: Gathering, now: float) -> float:
    """Return the next time at which time alone changes something. `now` is the time of
    the last step, which handled everything due until then."""
    times = [asked.until for asked in state.asked.values()]
    times += [member.gone_at for member in state.members.values()]
    return min((at for at in (times or [state.deadline]) if at > now), default=math.inf)


def waits_for(state: Gathering, fragments: int) -> str:
    """Describe the wait, for people."""
    (giver,) = state.names
    return (
        f"the run begins with the parameters of island {giver!r}, of which "
        f"{len(state.got)} of {fragments} fragments have arrived"
    )


def _offered(
    config: PolicyConfig, state: Gathering, event: Offered, now: float
) -> Step:
    offer = event.hello
    if offer.island not in state.names:
        message = f"{waits_for(state, config.fragments)}; come again"
        return state, [Postpone(session=offer.session, message=message)]
    known = state.members.get(offer.island)
    if refused := _refusal(config, known.offer if known else None, event):
        return state, [Tell(session=offer.session, message=refused)]
    effects: list[Effect] = []
    if known is not None and offer.incarnation > known.offer.incarnation:
        fenced = _fenced(known.offer, offer.incarnation)
        state, effects = _forget(config, state, now)
        effects.append(Tell(session=known.offer.session, message=fenced))
    member = Offering(offer=offer, gone_at=now + config.lease_s)
    state = replace(state, phase="fetching", members={offer.island: member})
    welcome = Welcome(run_id=config.run_id, term=0, resumed=False, versions=())
    effects.append(Tell(session=offer.session, message=welcome))
    # The request for an anchor may be lost with the old connection.
    effects += [
        Tell(session=offer.session, message=AnchorRequest(fragment=fragment))
        for fragment in state.asked
    ]
    return state, effects


def _refusal(
    config: PolicyConfig, known: Hello | None, event: Offered
) -> Refused | None:
    offer = event.hello
    if event.differences:
        return Refused(
            code="config",
            message=f"island {offer.island!r} is to give the run's first parameters, "
            f"and differs from the coordinator: {'; '.join(event.differences)} (here: "
            f"the coordinator's); start both with one config",
        )
    if offer.run_id not in ("", config.run_id):
        return Refused(
            code="run_id",
            message=f"this coordinator begins run {config.run_id}, the island belongs "
            f"to run {offer.run_id}; check the coordinator's address",
        )
    if known is None or offer.incarnation > known.incarnation:
        return None
    if offer.incarnation < known.incarnation:
        return _fenced(offer, known.incarnation)
    if offer.session != known.session:
        return Refused(
            code="name_in_use",
            message=f"the name {offer.island!r} is in use by another process with the "
            f"same incarnation {offer.incarnation}; replace that process by starting "
            f"incarnation {offer.incarnation + 1}",
        )
    return None


def _fenced(old: Hello, incarnation: int) -> Refused:
    return Refused(
        code="fenced",
        message=f"island {old.island!r} is incarnation {incarnation} now, this is "
        f"{old.incarnation}; stop this process",
    )


def _arrived(state: Gathering, event: AnchorArrived) -> Gathering:
    asked, member = state.asked.get(event.fragment), state.members.get(event.island)
    if asked is None or member is None:
        return state
    whose = (member.offer.incarnation, FIRST_VERSION)
    if (event.incarnation, event.version) != whose:
        return state
    got = {**state.got, event.fragment: Got(event.island, FIRST_VERSION)}
    return replace(state, got=got, asked={})


def _advance(config: PolicyConfig, state: Gathering, now: float) -> Step:
    """Do what is due: forget an island that is gone, ask for the next fragment, end."""
    if state.phase == "over":
        return state, []
    (giver,), effects = state.names, list[Effect]()
    member = state.members.get(giver)
    if member is not None and now >= member.gone_at:
        state, effects = _forget(config, state, now)
        member = None
    if member is None:
        if now < state.deadline:
            return state, effects
        return _give_up(
            state,
            f"island {giver!r}, which is to give the run's first parameters, did not "
            f"come within placement.compile_budget_s = {config.compile_budget_s:g} s",
        )
    if late := [f for f, asked in state.asked.items() if now >= asked.until]:
        return _give_up(
            state,
            f"fragment {late[0]} of the run's first parameters did not come from "
            f"island {giver!r} within {_patience_s(config):g} s (placement."
            f"compile_budget_s and outage_budget_s)",
        )
    lacking = [f for f in range(config.fragments) if f not in state.got]
    if not lacking:
        first = (FIRST_VERSION,) * config.fragments
        opened = Open(
            run_id=config.run_id,
            term=FIRST_VERSION.term,
            versions=first,
            sources=(giver,) * config.fragments,
            replaced=first,
            tokens=0,
            next_position=0,
        )
        return replace(state, phase="over"), [*effects, opened]
    if not state.asked and member.connected:
        asked = AwaitedAnchor(giver, now + _patience_s(config))
        state = replace(state, asked={lacking[0]: asked})
        request = AnchorRequest(fragment=lacking[0])
        effects.append(Tell(session=member.offer.session, message=request))
    return state, effects


def _patience_s(config: PolicyConfig) -> float:
    """Return the seconds within which a fragment must come: the island answers at its
    first boundary, after it has compiled."""
    return config.compile_budget_s + config.outage_budget_s


def _forget(config: PolicyConfig, state: Gathering, now: float) -> Step:
    """Wait for the island anew: what it gave was of an attempt that is over."""
    discards: list[Effect] = [
        Discard(
            island=asked.island,
            incarnation=state.members[asked.island].offer.incarnation,
            fragment=fragment,
        )
        for fragment, asked in state.asked.items()
    ]
    return begin(config, state.names, now), discards


def _give_up(state: Gathering, message: str) -> Step:
    return replace(state, phase="over"), [GiveUp(message=message)]
