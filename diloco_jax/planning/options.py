"""Assumptions of a plan about the world, and the options of `diloco plan`.

Price of a run's machines, from prices that the user gives.

List prices differ between regions and change, and no table of them can be cited here:
so the package has none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from diloco_jax.config import Config
from diloco_jax.config.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    check_bounds,
    setting,
)
from diloco_jax.errors import ConfigError
from diloco_jax.hardware.tpus import GENERATIONS, slice_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions about the world around the islands: interruptions and links."""

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


COORDINATOR = "coordinator"


def parse_prices(text: str) -> dict[str, float]:
    """Read "v5p=4.2,coordinator=3.1"; empty for an empty text. Raises ConfigError."""
    prices: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        known = (*GENERATIONS, COORDINATOR)
        try:
            price = float(value)
        except ValueError:
            price = math.nan
        if name not in known or not 0 <= price < math.inf:
            raise ConfigError(
                f"price = {text!r}: {part!r} is not NAME=NUMBER with a name of "
                f"{', '.join(known)} and a number of at least 0"
            )
        prices[name] = price
    return prices


def require_prices(config: Config, prices: Mapping[str, float]) -> None:
    """Raise ConfigError if a price is missing."""
    needed = {COORDINATOR} | {
        slice_of(n, i).generation.name for n, i in config.islands.items()
    }
    if missing := sorted(needed - set(prices)):
        raise ConfigError(
            f"price has {', '.join(prices)} and lacks {', '.join(missing)}; add "
            f"{missing[0]}=NUMBER"
        )


def price_per_hour(config: Config, prices: Mapping[str, float]) -> dict[str, float]:
    """Return the hourly price of the chips by generation, and of the coordinator's
    machines.

    prices: per chip by generation, and per machine and its disk for "coordinator".
    """
    parts: dict[str, float] = {}
    for name, island in config.islands.items():
        found = slice_of(name, island)
        generation = found.generation.name
        chips = found.chips * prices[generation]
        parts[generation] = parts.get(generation, 0.0) + chips
    # Each worker has a machine like the coordinator's.
    workers = config.placement.workers
    machines = 1 + (workers if workers > 1 else 0)
    parts[COORDINATOR] = machines * prices[COORDINATOR]
    return parts


def price_sentence(per_hour: Mapping[str, float]) -> str:
    """Return one sentence with the price per hour and its parts."""
    parts = ", ".join(f"{name} {price:,.2f}" for name, price in per_hour.items())
    return (
        f"price per hour: {sum(per_hour.values()):,.2f} ({parts}), by your --price; "
        f"without disks of islands, traffic between regions, and discounts"
    )
