"""Whether a process of the run may be struck by an operator."""

from __future__ import annotations

from diloco_jax.protocol.coordinator.state import PolicyConfig, State
from diloco_jax.protocol.messages import StrikeOrder


def refusal(config: PolicyConfig, state: State, order: StrikeOrder) -> str:
    """Explain why this strike is not carried out; empty if it is."""
    if not config.chaos:
        return (
            "placement.chaos is off, so that nobody strikes this run; set "
            "placement.chaos = True for the coordinator and its islands"
        )
    if (order.kind == "kill") == (order.seconds > 0):
        return (
            f"{order.kind} for {order.seconds:g} s; a kill has no seconds, and a stop "
            f"has some"
        )
    if order.who is None:
        return ""
    island = state.islands.get(order.who)
    if island is None or island.status != "live":
        live = [name for name, i in state.islands.items() if i.status == "live"]
        status = "not in the run" if island is None else island.status
        return f"island {order.who!r} is {status}; live are {', '.join(live) or 'none'}"
    return ""
