"""Runs that stop."""

from typing import Any

from kit import Driver, joined

from diloco_jax.protocol.coordinator.state import Effect
from diloco_jax.protocol.holding import Merge


def stopping(*names: str, steps: int = 10, **changes: Any) -> Driver:
    """Islands that have done `steps` steps; the last report ended the run."""
    total = len(names) * steps * 10
    d = joined(*names, steps_per_cycle=10**6, total_tokens=total, **changes)
    for name in names:
        d.report(name, steps)
    assert d.state.phase == "stopping"
    return d


def stop(d: Driver, *names: str) -> list[Effect]:
    effects: list[Effect] = []
    for name in names:
        effects += d.report(name, phase="stopped")
    return effects


def pending(**changes: Any) -> Driver:
    """b's delta of 1 step was too late for the merge of the others; all have stopped,
    a and c after 5 steps and b after 3."""
    d = joined(
        "a",
        "b",
        "c",
        fragment_sizes=(4,),
        steps_per_cycle=4,
        total_tokens=130,
        **changes,
    )
    d.report("b", 1)
    d.reports(a=4, c=4)
    d.take("b", 0, 1, arrive=False)
    d.take("c", 0, 4)
    if d.fragment(0).phase == "open":
        d.take("a", 0, 4)
    else:
        d.take("a", 0, 4, arrive=False)
    d.computed(0)
    for name, steps in (("b", 3), ("a", 5), ("c", 5)):
        d.report(name, steps)
    stop(d, "a", "b", "c")
    assert d.state.phase == "flushing"
    return d


def whose(merge: Merge) -> list[tuple[str, int, int]]:
    """Return the islands and the steps of a merge's deltas."""
    return [(c.island, c.start, c.end) for c in merge.contributions]
