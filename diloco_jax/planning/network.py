"""Rates that an island's link has to carry, and the time that a join takes on it.

Every byte crosses the link once, however many hosts and copies of the model an island
has: its hosts fetch disjoint parts, and the slice's own interconnect spreads them.
"""

from __future__ import annotations

import dataclasses

from diloco_jax.config import SyncConfig
from diloco_jax.coordinator.sizes import payload_bytes
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.simulation.fleets.bandwidth import BandwidthConfig

LINK_UTILISATION = BandwidthConfig.link_utilisation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Gbit/s in one direction."""

    mean: float
    """Mean rate over a cycle of the run."""
    peak: float
    """Rate while the largest fragment is under way; each direction has half of the
    overlap window.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandNetwork:
    """Rates of one island's link."""

    up: Rates
    down: Rates
    join_seconds: float
    """Seconds in which the link carries all anchors in f32."""


def island_network(
    sync: SyncConfig,
    plan: FragmentPlan,
    pacing_seconds: float,
    own_seconds: float,
    link_gbit_per_s: float,
) -> IslandNetwork:
    """Return the rates of an island's link.

    pacing_seconds: seconds of a step of the island that sets the pace of ticks, which
    ask every island. own_seconds: seconds of a step of this island, whose steps are its
    overlap window.
    """
    return IslandNetwork(
        up=_rates(sync, sync.codec_up, plan, pacing_seconds, own_seconds),
        down=_rates(sync, sync.codec_down, plan, pacing_seconds, own_seconds),
        join_seconds=_gbit(4 * plan.total) / link_gbit_per_s,
    )


def _rates(
    sync: SyncConfig, codec: str, plan: FragmentPlan, pacing: float, own: float
) -> Rates:
    sizes = payload_bytes(codec, plan)
    mean = _gbit(sum(sizes)) / (sync.steps_per_cycle * pacing)
    # Without overlap an island waits; a window of one step is a fair share.
    window = max(1, sync.overlap_steps) * own / 2
    return Rates(mean=mean, peak=max(mean, _gbit(max(sizes)) / window))


def _gbit(octets: int) -> float:
    """Return the gigabits that a link must be able to carry for a payload."""
    return 8e-9 * octets / LINK_UTILISATION
