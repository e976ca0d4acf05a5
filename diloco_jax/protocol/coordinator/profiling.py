"""Which island can be asked for a trace of its steps. Nothing of the run depends on
it."""

from __future__ import annotations

from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.messages import ProfileOrder

WITHIN_STEPS = 10
"""Times as long as its steps take usually that an island may take for the traced
ones: tracing slows it down."""


def refusal(state: State, order: ProfileOrder) -> str:
    """Explain why this island cannot be asked; empty if it can."""
    island = state.islands.get(order.island)
    if island is None:
        known = ", ".join(map(repr, state.islands)) or "none"
        return f"no island {order.island!r} was ever in the run; there were {known}"
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


def within_s(state: State, order: ProfileOrder, budget_s: float) -> float:
    """Return the longest time for tracing. budget_s: the time budget."""
    step_seconds = state.islands[order.island].step_seconds
    return budget_s + WITHIN_STEPS * (order.steps + 2) * step_seconds
