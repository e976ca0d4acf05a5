"""Price of a run's machines, from prices that the user gives.

List prices differ between regions and change, and no table of them can be cited here:
so the package has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from diloco_jax.config import Config
from diloco_jax.errors import ConfigError
from diloco_jax.hardware.slices import GENERATIONS, slice_of

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
    # Each worker apart has a machine like the coordinator's.
    machines = 1 + config.launch.workers_apart * config.placement.workers
    parts[COORDINATOR] = machines * prices[COORDINATOR]
    return parts


def sentence(per_hour: Mapping[str, float]) -> str:
    """Return one sentence with the price per hour and its parts."""
    parts = ", ".join(f"{name} {price:,.2f}" for name, price in per_hour.items())
    return (
        f"price per hour: {sum(per_hour.values()):,.2f} ({parts}), by your --price; "
        f"without disks of islands, traffic between regions, and discounts"
    )
