"""Assumptions of a plan about the world, and the options of `diloco plan`."""

from __future__ import annotations

import dataclasses

from diloco_jax.config.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    check_bounds,
    setting,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions about the world around the islands: interruptions, links, spread of
    steps.
    """

    mtbi_years: float = setting(
        1.0,
        NOT_NEGATIVE,
        help="Mean years between interruptions of one chip; 0 = they never come.",
    )
    return_minutes: float = setting(
        15.0,
        NOT_NEGATIVE,
        help="Minutes until an island that lost its slice steps again: a new slice, "
        "start, compilation; the fetch of the parameters comes on top.",
    )
    step_spread: float = setting(
        0.05, SHARE, help="Standard deviation of step times over their mean."
    )
    link_gbit_per_s: float = setting(
        5.0, POSITIVE, help="Gbit/s of each island's link, each way."
    )

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(Assumptions):
    """The options of `diloco plan`."""

    json: bool = setting(
        False, help="Print the plan to standard output as one JSON object."
    )
    arithmetic: bool = setting(
        False,
        help="Compile nothing: take steps by formula at the chips' peak rates, and "
        "check links and coordinator alone.",
    )
    price: str = setting(
        "",
        help="Prices per hour as you know them, v5p=N,v6e=N,coordinator=N: of a chip "
        "by generation, and of the coordinator's machine with its disk.",
    )

    @property
    def assumptions(self) -> Assumptions:
        """The assumptions alone, without the options of the output."""
        fields = dataclasses.fields(Assumptions)
        return Assumptions(**{f.name: getattr(self, f.name) for f in fields})
