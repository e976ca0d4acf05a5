"""Whether a process of the run may be struck by an operator."""

from __future__ import annotations

from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.messages import Refused, StrikeOrder

NEVER = "chaos"
"""Code of a refusal for good. With another one the same order may be carried out later.
"""


def refusal(config: PolicyConfig, state: State, order: StrikeOrder) -> Refused | None:
    """Return the answer to a strike that is not carried out; None if it is."""
    if not config.chaos:
        return Refused(
            code=NEVER,
            message="placement.chaos is off, so that nobody strikes this run; set "
            "placement.chaos = True for the coordinator and its islands",
        )
    if (order.kind == "kill") == (order.seconds > 0):
        return Refused(
            code=NEVER,
            message=f"{order.kind} for {order.seconds:g} s; a kill has no seconds, and "
            f"a stop has some",
        )
    if order.who is None:
        return None
    island = state.islands.get(order.who)
    if island is None or island.status != "live":
        live = state.islands.standing.live
        status = "not in the run" if island is None else island.status
        return Refused(
            code="absent",
            message=f"island {order.who!r} is {status}; live are "
            f"{', '.join(live) or 'none'}",
        )
    return None
