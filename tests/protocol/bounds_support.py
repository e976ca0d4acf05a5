"""Runs whose merges wait for all islands, and whose deltas have lengths."""

from typing import Any

from kit import Driver, joined, of

from diloco_jax.protocol.coordinator.state import Effect
from diloco_jax.protocol.holding import Merge


def patient(*names: str, **changes: Any) -> Driver:
    """A run of one fragment whose merges wait for all islands."""
    settings: dict[str, Any] = {
        "fragment_sizes": (10,),
        "grace": 0.8,
        "overlap_steps": 1000,
        "delta_bound": 5.0,
    }
    driver = joined(*names, **{**settings, **changes})
    return driver


def together(
    driver: Driver, rate_sum: float | None = None, **norms: float
) -> list[Effect]:
    """One cycle: every island takes four more steps; merge what is ready."""
    steps = {name: driver.state.islands[name].steps + 4 for name in norms}
    for name in norms:
        driver.report(name, steps[name])
    effects: list[Effect] = []
    for name, norm in norms.items():
        effects += driver.take(name, 0, steps[name], norm=norm, rate_sum=rate_sum)
    if of(effects, Merge):
        effects += driver.computed(0)
    return effects


def give_up(driver: Driver, name: str) -> None:
    """The island has heard of the refusal, and restarts from the anchor."""
    tick = driver.tick_of(name, 0)
    steps = driver.state.islands[name].steps
    driver.report(
        name, steps, driver.record(name, "reset", steps, tick=tick, fragment=0)
    )
