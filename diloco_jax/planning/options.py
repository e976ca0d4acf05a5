"""What a plan supposes of the world, and the options of `diloco plan`."""

from __future__ import annotations

import dataclasses

from diloco_jax.validation import NOT_NEGATIVE, POSITIVE, SHARE, within


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Of the world around the islands."""

    mtbi_years: float = 1.0
    """Mean time between interruptions of one chip; 0 = they never come."""
    return_minutes: float = 15.0
    """Until an island that lost its slice steps again: a new slice, start, compilation;
    the fetch of the parameters comes on top."""
    step_spread: float = 0.05
    """Standard deviation of step times over their mean."""
    link_gbit_per_s: float = 5.0
    """Of each island's link, each way."""

    def validate(self) -> None:
        """Raises ConfigError naming field, value and remedy."""
        within(self, SHARE, "step_spread")
        within(self, NOT_NEGATIVE, "mtbi_years", "return_minutes")
        within(self, POSITIVE, "link_gbit_per_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(Assumptions):
    """Of `diloco plan`."""

    json: bool = False
    """Print the plan to standard output as one JSON object."""

    @property
    def assumptions(self) -> Assumptions:
        """Without what is about the output."""
        fields = dataclasses.fields(Assumptions)
        return Assumptions(**{f.name: getattr(self, f.name) for f in fields})
