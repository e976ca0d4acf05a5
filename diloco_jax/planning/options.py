"""What a plan takes from its user: assumptions, measured values, prices, options.

A plan has two speeds. What a run will take, in days and money, follows from the share
of the chips' peak that is expected of them. What may not run is refused by the fastest
that the steps can be. A value that was measured counts before an assumption, and its
origin is told beside it.

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
from diloco_jax.config.placement import region_of, zones_of
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
    share: tuple[float, ...] = setting(
        (0.5,),
        metavar="EXPECTED [UPPER]",
        help="Share of the chips' peak that the model's FLOPs are expected to reach, "
        "by which days, tokens and price are told; and the most that they can reach, "
        "by which checks refuse (without it they go by the bound at peak).",
    )

    @property
    def expected_share(self) -> float:
        """Share of peak by which days, tokens and price are told."""
        return self.share[0]

    @property
    def upper_share(self) -> float:
        """Share of peak that no step exceeds; 1 if the user knows none."""
        return self.share[-1] if len(self.share) > 1 else 1.0

    @property
    def bound(self) -> str:
        """The speed by which checks refuse, in words."""
        upper = self.upper_share
        return "at peak" if upper == 1 else f"at {upper:g} of peak"

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)
        shares = self.share
        if len(shares) not in (1, 2) or not 0 < shares[0] <= shares[-1] <= 1:
            raise ConfigError(
                f"share = {' '.join(f'{s:g}' for s in shares) or 'nothing'}; give the "
                f"expected share of peak, above 0 and at most 1, and where it is known "
                f"the upper one, which is no smaller: --share 0.5, --share 0.4 0.65"
            )


# ---- options ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(Assumptions):
    """The options of `diloco plan`."""

    json: bool = setting(
        False, help="Print the plan to standard output as one JSON object."
    )
    arithmetic: bool = setting(
        False,
        help="Compile nothing: take steps by formula, and check links, coordinator and "
        "what islands hold in HBM between steps alone.",
    )
    measured: str = setting(
        "",
        metavar="FILE",
        help="Values that were measured, as JSON, each with its origin; they count "
        "before assumptions, constants and published rates.",
    )
    price: str = setting(
        "",
        help="Prices as you know them, v5p=N,v6e=N,coordinator=N,traffic=N: per hour "
        "of a chip by generation, and of the coordinator's machine with its disk; and "
        "per GB between regions.",
    )

    @property
    def assumptions(self) -> Assumptions:
        """The assumptions alone, without the options of the output."""
        fields = dataclasses.fields(Assumptions)
        return Assumptions(**{f.name: getattr(self, f.name) for f in fields})


# ---- prices -------------------------------------------------------------------------

COORDINATOR = "coordinator"
TRAFFIC = "traffic"


def parse_prices(text: str) -> dict[str, float]:
    """Read "v5p=4.2,coordinator=3.1"; empty for an empty text. Raises ConfigError."""
    prices: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        known = (*GENERATIONS, COORDINATOR, TRAFFIC)
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


def require_prices(
    config: Config, prices: Mapping[str, float], *, traffic: bool = False
) -> None:
    """Raise ConfigError if a price is missing. traffic: that of traffic is needed where
    islands are in other regions than the coordinator."""
    needed = {COORDINATOR} | {
        slice_of(n, i).generation.name for n, i in config.islands.items()
    }
    if traffic and away(config):
        needed.add(TRAFFIC)
    if missing := sorted(needed - set(prices)):
        raise ConfigError(
            f"price has {', '.join(prices)} and lacks {', '.join(missing)}; add "
            f"{missing[0]}=NUMBER"
        )


def away(config: Config) -> list[str]:
    """Return the islands whose first zone is in another region than the coordinator's;
    none without zones."""
    home, zones = config.launch.coordinator_zone, config.launch.zones
    first = {name: zones_of(zones.get(name, ""))[0] for name in config.islands}
    return [
        name
        for name, zone in first.items()
        if home and zone and region_of(zone) != region_of(home)
    ]


def price_per_hour(
    config: Config, prices: Mapping[str, float], crossing_gb: float = 0.0
) -> dict[str, float]:
    """Return the hourly price of the chips by generation, of the coordinator's
    machines, and of traffic between regions where there is any.

    prices: per chip by generation, per machine and its disk for "coordinator", per GB
    for "traffic". crossing_gb: GB of an hour that cross from region to region.
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
    if crossing_gb:
        parts[TRAFFIC] = crossing_gb * prices[TRAFFIC]
    return parts


def price_sentence(per_hour: Mapping[str, float]) -> str:
    """Return one sentence with the price per hour and its parts."""
    parts = ", ".join(f"{name} {price:,.2f}" for name, price in per_hour.items())
    without = "" if TRAFFIC in per_hour else "traffic between regions, "
    return (
        f"price per hour: {sum(per_hour.values()):,.2f} ({parts}), by your --price; "
        f"without disks of islands, {without}and discounts"
    )
