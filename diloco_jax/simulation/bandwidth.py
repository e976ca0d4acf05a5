"""`diloco simulate bandwidth`: rates that links must carry, from one formula.

Data-parallel: a ring all-reduce of bf16 gradients at every step. For B bits, each of n
sites sends 2 (n - 1) / n B, and receives as much. For 7 B parameters, 8 sites and 1 s
steps that is 196.0 Gbit/s of payload. The published 198 follows if links carry payload
for 99 % of the time, which is our reading: the paper does not give its own terms. The
same share applies to both methods.

Decoupled: in one cycle of H steps a site sends every parameter once, encoded, and gets
every parameter once. Rates are one site's in one direction, as for data-parallel; the
coordinator has `sites` times as much. At its peak the largest fragment goes up and
comes back down within the overlap window, half of which each direction may use.

On links of a given speed, a data-parallel step is its computation and then its exchange
(conventional synchronization; hidden in full behind the computation, it would save that
once). A decoupled step is its computation, or longer if the link cannot carry the mean.
"""

from __future__ import annotations

import dataclasses

from diloco_jax.config import SyncConfig
from diloco_jax.config.config import check_member
from diloco_jax.config.fields import AT_LEAST_1, Bound, check_bounds, setting
from diloco_jax.config.resolving import LONG
from diloco_jax.core.codecs import Codec
from diloco_jax.core.families import CODECS
from diloco_jax.simulation.fleet import (
    FRAGMENTS,
    GBIT_PER_S,
    PARAMS,
    STEP_SECONDS,
    require_cut,
)

PUBLISHED_CASE = "published for 8 sites, 7 B, 1 s"
PUBLISHED_DATA_PARALLEL_GBIT_PER_S = 198.0
PUBLISHED_DECOUPLED_GBIT_PER_S = 0.84
PUBLISHED_SPEEDUP = "more than 20"
"""Speedup over conventional synchronization, for 12 B parameters in four regions with
links of 2 to 5 Gbit/s.
"""
GRADIENT_CODEC = "bf16"
OVERLAP = Bound(1e-6)
UTILISATION = Bound(1e-6, 1)
"""Within these bounds every result is finite, as JSON asks for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandwidthConfig:
    """Terms of the formula. The defaults of parameters, sites and step are the
    published case.
    """

    params: float = setting(7e9, PARAMS, help="Parameters of the model.")
    sites: int = setting(8, AT_LEAST_1, help="Data centres, an island each.")
    step_seconds: float = setting(1.0, STEP_SECONDS, help="Seconds of a step.")
    cycle: int = setting(
        LONG.cycle,
        AT_LEAST_1,
        help="H: inner steps in which every fragment is exchanged once.",
    )
    fragments: int = setting(
        SyncConfig.fragments,
        FRAGMENTS,
        help="P: fragments that the model is cut into.",
    )
    largest: float = setting(
        1.0,
        AT_LEAST_1,
        help="The largest fragment over the mean one; only the peak follows from it.",
    )
    overlap: float = setting(
        LONG.overlap,
        OVERLAP,
        help="tau: steps between a take and its adoption.",
    )
    codec: str = setting(SyncConfig.codec_up, help="Encoding of deltas and publishes.")
    link_utilisation: float = setting(
        0.99, UTILISATION, help="Share of the time in which a link carries payload."
    )
    link_gbit_per_s: float = setting(
        5.0,
        GBIT_PER_S,
        help="Gbit/s of a site's link, in one direction, for which step times are "
        "shown.",
    )

    @property
    def as_published(self) -> bool:
        """True if the published rates are for this case."""
        case = (self.params, self.sites, self.step_seconds)
        usual = BandwidthConfig
        return case == (usual.params, usual.sites, usual.step_seconds)

    @property
    def speedup_is_published(self) -> bool:
        """True if the published speedup is for this case."""
        case = (self.params, self.sites) == (12e9, 4)
        return case and 2 <= self.link_gbit_per_s <= 5

    def validate(self) -> None:
        """Raise ConfigError naming field, value and remedy."""
        check_bounds(self)
        check_member("codec", CODECS, self.codec)
        require_cut(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Gbit/s of one site in one direction, unless a field says otherwise."""

    config: BandwidthConfig
    data_parallel_gbit_per_s: float
    decoupled_gbit_per_s: float
    """Mean over a cycle."""
    peak_gbit_per_s: float
    """Rate while a fragment is under way."""
    coordinator_gbit_per_s: float
    """Mean over a cycle, for all sites together."""
    bytes_per_parameter: float
    """Bytes of an encoded parameter, block scales included."""
    published_at_cycle: float
    """H at which the formula gives the published decoupled figure, all else equal."""
    published_at_utilisation: float
    """Link utilisation at which it does; above 1 if no link can do it."""
    data_parallel_step_seconds: float
    """Seconds on the links of the config, with none of the exchange hidden."""
    decoupled_step_seconds: float

    @property
    def speedup(self) -> float:
        """Ratio of a data-parallel step to a decoupled one, in seconds."""
        return self.data_parallel_step_seconds / self.decoupled_step_seconds

    def formulas(self) -> list[str]:
        """Return the results with the terms that they come from."""
        c = self.config
        gradient = _bytes_per_parameter(GRADIENT_CODEC)
        encoded = f"{self.bytes_per_parameter:.5g} B ({c.codec})"
        seconds = f"{c.step_seconds:g} s"
        lines = [
            f"data-parallel: 2 ({c.sites} - 1) / {c.sites} x {c.params:.4g} parameters "
            f"x {gradient:g} B x 8 / {seconds} / {c.link_utilisation:g} utilisation "
            f"= {self.data_parallel_gbit_per_s:.4g} Gbit/s "
            f"({PUBLISHED_CASE}: {PUBLISHED_DATA_PARALLEL_GBIT_PER_S:g})",
            f"decoupled: {c.params:.4g} parameters x {encoded} x 8 / ({c.cycle} steps "
            f"x {seconds}) / {c.link_utilisation:g} utilisation "
            f"= {self.decoupled_gbit_per_s:.4g} Gbit/s "
            f"({PUBLISHED_CASE}: {PUBLISHED_DECOUPLED_GBIT_PER_S:g})",
            f"peak: {c.params:.4g} / {c.fragments} parameters x "
            f"{f'{c.largest:.4g} (largest) x ' * (c.largest > 1)}{encoded} x 8 / "
            f"({c.overlap:g} / 2 steps x {seconds}) / {c.link_utilisation:g} "
            f"utilisation, not below the mean = {self.peak_gbit_per_s:.4g} Gbit/s",
            f"coordinator: {c.sites} sites x decoupled "
            f"= {self.coordinator_gbit_per_s:.4g} Gbit/s",
        ]
        published = f" (published: {PUBLISHED_SPEEDUP})" * c.speedup_is_published
        exchange_seconds = self.data_parallel_step_seconds - c.step_seconds
        lines.append(
            f"on links of {c.link_gbit_per_s:g} Gbit/s: a data-parallel step takes "
            f"{seconds} + {exchange_seconds:.4g} s of exchange, a decoupled one "
            f"{self.decoupled_step_seconds:.4g} s, so it is {self.speedup:.1f} times "
            f"as fast{published}"
        )
        if c.as_published:
            none = "; no link has it" if self.published_at_utilisation > 1 else ""
            lines.append(
                f"the published {PUBLISHED_DECOUPLED_GBIT_PER_S:g} Gbit/s: this "
                f"formula gives it with a cycle of {self.published_at_cycle:.1f} "
                f"steps, or with {self.published_at_utilisation:.2f} utilisation{none}"
            )
        return lines


def simulate_bandwidth(config: BandwidthConfig) -> Bandwidth:
    """Evaluate the formulas of this module. Raises ConfigError."""
    config.validate()
    per_second = 8e-9 / config.step_seconds / config.link_utilisation
    each = _bytes_per_parameter(config.codec)
    ring = 2 * (config.sites - 1) / config.sites
    gradient_bytes = config.params * _bytes_per_parameter(GRADIENT_CODEC)
    mean = config.params * each / config.cycle * per_second
    fragment_bytes = config.largest * config.params / config.fragments * each
    fragment = fragment_bytes / (config.overlap / 2)
    relative = mean / PUBLISHED_DECOUPLED_GBIT_PER_S
    gradients = ring * gradient_bytes * per_second
    link = config.link_gbit_per_s
    return Bandwidth(
        config=config,
        data_parallel_gbit_per_s=gradients,
        decoupled_gbit_per_s=mean,
        peak_gbit_per_s=max(mean, fragment * per_second),
        coordinator_gbit_per_s=config.sites * mean,
        bytes_per_parameter=each,
        published_at_cycle=config.cycle * relative,
        published_at_utilisation=config.link_utilisation * relative,
        data_parallel_step_seconds=config.step_seconds * (1 + gradients / link),
        decoupled_step_seconds=config.step_seconds * max(1.0, mean / link),
    )


def _bytes_per_parameter(codec: str) -> float:
    """Return the bytes per parameter of a large tensor."""
    elements = 1 << 20
    return Codec(codec).tile_bytes(elements) / elements
