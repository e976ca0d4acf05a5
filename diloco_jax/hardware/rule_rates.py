"""Rates of merge rules: what a rule takes beyond a weighted sum, by number of deltas.

Every `WeightedSum` is merged by the same passes, of which `MachineRates` has the rates.
The other kinds do more, and need not grow in proportion to the deltas: a sort does not.
So a rule has points, and the cost between two of them follows a power of the number.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from diloco_jax.merge_route import Route


class RuleRates(msgspec.Struct, frozen=True, kw_only=True):
    """Work of one rule beyond that of a weighted sum."""

    beyond_core_seconds: tuple[tuple[int, float], ...]
    """(deltas, core seconds per 1e9 parameters), by deltas: at least two, above 0."""
    rule_from: str
    """Command, machine and date."""

    def beyond(self, deltas: int) -> float:
        """Return the core seconds per 1e9 parameters of a merge of so many deltas.

        Fewer than the first point has cost as much as it; beyond the last point the
        power of the last two goes on.
        """
        points = self.beyond_core_seconds
        if deltas <= points[0][0]:
            return points[0][1]
        around = (pair for pair in pairwise(points) if deltas <= pair[1][0])
        (few, less), (many, more) = next(around, points[-2:])
        power = math.log(more / less) / math.log(many / few)
        return float(less * (deltas / few) ** power)

    def line(self, rule: str) -> str:
        """Return a line for people."""
        points = ", ".join(
            f"{seconds:.3g} for {deltas}"
            for deltas, seconds in self.beyond_core_seconds
        )
        return (
            f"rule {rule}, core seconds per 1e9 parameters beyond a weighted sum, by "
            f"deltas: {points} [{self.rule_from}]"
        )


RULES_FROM = (
    "constant: `python benchmarks/merging.py --rules`, 2 cores, Intel Xeon, 2026-11-27"
)
RULES_OF_PACKAGE: dict[Route, dict[str, RuleRates]] = {
    "native": {
        "trimmed_mean": RuleRates(
            beyond_core_seconds=((2, 3.2), (8, 11.2), (64, 248.0)), rule_from=RULES_FROM
        )
    },
    "xla": {
        "trimmed_mean": RuleRates(
            beyond_core_seconds=((2, 2.2), (8, 7.1), (64, 216.0)), rule_from=RULES_FROM
        )
    },
}
"""Rules of the package that are no weighted sums, by merge route: what they take less
what `mean` takes in docs/results/merging.md, int8, 4 Mi elements. XLA computes them on
either route. So by "xla" a merge takes what it takes by "native", with the checks and
the publish of that route; beyond its weighted sum this is less."""
