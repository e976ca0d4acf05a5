"""Requests of an operator while the run goes on.

An island that the config does not name is let in, or put out again; a quarantined one
is released. Each of these changes is durable. An island can also be asked for a trace
of its steps, on which nothing of the run depends.
"""

from __future__ import annotations

from diloco_jax.protocol import records
from diloco_jax.protocol.coordinator import members, takes
from diloco_jax.protocol.coordinator.state import PolicyConfig, State, Turn
from diloco_jax.protocol.messages import ProfileOrder, Refused, Steer

MOST_ADMITTED = 64
"""Islands that operators may have let in at once: the server has places for them."""


def refusal(config: PolicyConfig, state: State, event: Steer) -> str:
    """Explain why this cannot be done; empty if it can, or is done already."""
    name = event.island
    match event.how:
        case "admit":
            if is_in(config, state, name):
                return ""
            if len(state.admitted) < MOST_ADMITTED:
                return lacks_room(config, (*state.admitted, name))
            return (
                f"{len(state.admitted)} islands are let in besides those of the "
                f"config, and no more can be; remove one (`diloco admit NAME "
                f"--remove`), or start the coordinator with a config that has {name!r}"
            )
        case "remove":
            if name in state.admitted or not is_in(config, state, name):
                return ""
            return (
                f"island {name!r} is in the coordinator's config; shut it out with "
                f"`diloco certs DIR --revoke island.{name}`, or start the coordinator "
                f"with a config that has it neither in islands nor in placement.admit"
            )
        case "release":
            return "" if name in state.islands else _never_in(state, name)


def lacks_room(config: PolicyConfig, also: tuple[str, ...]) -> str:
    """Explain why there is no room for deltas of these islands beside those of the
    config; empty if there is. The flush of a fragment takes all islands' deltas."""
    count = len({*(config.admitted or ()), *also})
    needed = config.room_each * count
    if needed <= config.merge_buffer_bytes:
        return ""
    return (
        f"placement.merge_buffer_bytes = {config.merge_buffer_bytes}, but with "
        f"{', '.join(map(repr, also))}, which the config does not name, there are "
        f"{count} islands, and their deltas of the largest fragment take {needed}; "
        f"start the coordinator again with at least that, or remove one of these "
        f"(`diloco admit NAME --remove`)"
    )


def _never_in(state: State, name: str) -> str:
    known = ", ".join(map(repr, state.islands)) or "none"
    return f"no island {name!r} was ever in the run; there were {known}"


def is_in(config: PolicyConfig, state: State, name: str) -> bool:
    """Tell whether an island of that name may join."""
    return not members.unknown(config, name, state.admitted)


def steer(turn: Turn, event: Steer) -> None:
    """Do what an operator wants, unless it cannot be done or is done already."""
    name, state = event.island, turn.state
    if refusal(turn.config, state, event):
        return
    known = state.islands.get(name)
    match event.how:
        case "admit" if not is_in(turn.config, state, name):
            turn.state = members.with_admitted(state, name, admitted=True)
            turn.persist(records.Admitted(island=name))
        case "remove" if name in state.admitted:
            _remove(turn, name)
        case "release" if known is not None and known.quarantined:
            takes.release(turn, known, asked=True)


def _remove(turn: Turn, name: str) -> None:
    """Let an island in no longer; its incarnation ends, and what it had open is lost.
    What is in a merge already is merged."""
    turn.state = members.with_admitted(turn.state, name, admitted=False)
    island = turn.state.islands.get(name)
    if island is None or island.status == "gone":
        turn.persist(records.Removed(island=name))
        return
    message = f"an operator removed island {name!r} from the run"
    # In this order: after a crash between the two records, the order is given again.
    members.end(turn, name, "refused", message)
    turn.persist(records.Removed(island=name))
    members.forget(turn, name, island.incarnation + 1)
    refused = Refused(code="removed", message=f"{message}; stop this process")
    members.turn_away(turn, name, island.session, refused)


WITHIN_STEPS = 10
"""Times as long as its steps take usually that an island may take for the traced
ones: tracing slows it down."""


def trace_refusal(state: State, order: ProfileOrder) -> str:
    """Explain why this island cannot be asked; empty if it can."""
    island = state.islands.get(order.island)
    if island is None:
        return _never_in(state, order.island)
    if island.status != "live":
        return (
            f"island {order.island!r} is {island.status}, and makes no steps; ask "
            f"when `diloco status` shows that it trains"
        )
    if island.phase != "training":
        return (
            f"island {order.island!r} is {island.phase}, not training; ask when "
            f"`diloco status` shows that it trains"
        )
    return ""


def trace_within_s(state: State, order: ProfileOrder, budget_s: float) -> float:
    """Return the longest time for tracing. budget_s: the time budget."""
    step_seconds = state.islands[order.island].step_seconds
    return budget_s + WITHIN_STEPS * (order.steps + 2) * step_seconds
