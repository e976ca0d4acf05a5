"""Rates that an island's link has to carry."""

from __future__ import annotations

import dataclasses

from diloco_jax.config import SyncConfig
from diloco_jax.simulation.fleets.bandwidth import BandwidthConfig, simulate_bandwidth

LINK_UTILISATION = BandwidthConfig.link_utilisation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Gbit/s in one direction, by the formula of `diloco simulate bandwidth`."""

    mean: float
    """Mean rate over a cycle of the run."""
    peak: float
    """Rate while a fragment is under way; each direction has half of the overlap
    window.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class IslandNetwork:
    """Rates of one island's link."""

    up: Rates
    down: Rates


def island_network(
    sync: SyncConfig, params: int, pacing_seconds: float, own_seconds: float
) -> IslandNetwork:
    """Return the rates of an island's link.

    pacing_seconds: seconds of a step of the island that sets the pace of ticks, which
    ask every island. own_seconds: seconds of a step of this island, whose steps are its
    overlap window.
    """
    return IslandNetwork(
        up=_rates(sync, sync.codec_up, params, pacing_seconds, own_seconds),
        down=_rates(sync, sync.codec_down, params, pacing_seconds, own_seconds),
    )


def _rates(
    sync: SyncConfig, codec: str, params: int, pacing: float, own: float
) -> Rates:
    paced, alone = (
        simulate_bandwidth(
            BandwidthConfig(
                params=params,
                sites=1,
                step_seconds=seconds,
                cycle=sync.steps_per_cycle,
                fragments=sync.fragments,
                # Without overlap an island waits; a window of one step is a fair share.
                overlap=max(1, sync.overlap_steps),
                codec=codec,
                link_utilisation=LINK_UTILISATION,
            )
        )
        for seconds in (pacing, own)
    )
    mean = paced.decoupled_gbit_per_s
    return Rates(mean=mean, peak=max(mean, alone.peak_gbit_per_s))
