"""Runs that stop."""

from typing import Any

from kit import Driver

from diloco_jax.protocol.coordinator.events import Effect


def stopping(*names: str, steps: int = 10, **changes: Any) -> Driver:
    """Islands that have done `steps` steps; the last report ended the run."""
    total = len(names) * steps * 10
    d = Driver(steps_per_cycle=10**6, total_tokens=total, **changes)
    d.join(*names)
    for name in names:
        d.report(name, steps)
    assert d.state.phase == "stopping"
    return d


def stop(d: Driver, *names: str) -> list[Effect]:
    effects: list[Effect] = []
    for name in names:
        effects += d.report(name, phase="stopped")
    return effects
