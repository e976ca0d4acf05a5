"""Published rates of TPU chips: one table, and nowhere else.

Sources, looked up 2026-11-20, per chip: peak bf16 FLOP/s, HBM bandwidth and the ICI
total of both directions from Google's pages on v5p and v6e (cloud.google.com/tpu/docs/
v5p, v6e); links and wrap-around from "How to Scale Your Model" (jax-ml.github.io/
scaling-book), which has HBM bandwidth and links up to 12 % lower. `hbm_bytes` is what
libtpu's compiler says it has for a program.
"""

from __future__ import annotations

import dataclasses

from diloco_jax.config import ConfigError
from diloco_jax.hardware.slices import Slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Published rates of one generation of chips."""

    flops_per_s: float
    """Peak for bf16, and for f32 operands at the default precision, which rounds to
    bf16.
    """
    hbm_bytes: int
    """Bytes of HBM that a program may use."""
    hbm_bytes_per_s: float
    ici_bytes_per_s: float
    """Bytes per second of all links of a chip, one direction."""
    links: int
    """Links to neighbours, two per axis."""
    wraps_from: int
    """An axis is a ring if its length is a multiple of this, in chips, else a line.
    v5p: only if this holds for all axes.
    """
    wraps_together: bool
    device_kinds: tuple[str, ...]
    """Names under which JAX shows the chip (`Device.device_kind`)."""


GIB = 1 << 30
CHIPS = {
    "v5p": Chip(
        flops_per_s=459e12,
        hbm_bytes=int(95.74 * GIB),
        hbm_bytes_per_s=2765e9,
        ici_bytes_per_s=600e9,
        links=6,
        wraps_from=4,
        wraps_together=True,
        device_kinds=("TPU v5", "TPU v5p"),
    ),
    "v6e": Chip(
        flops_per_s=918e12,
        hbm_bytes=int(31.25 * GIB),
        hbm_bytes_per_s=1638e9,
        ici_bytes_per_s=400e9,
        links=4,
        wraps_from=16,
        wraps_together=False,
        device_kinds=("TPU v6 lite", "TPU v6e"),
    ),
}


def chip_of(found: Slice) -> Chip:
    """Return the rates of a slice's chips; ConfigError if they are not in the table."""
    name = found.generation.name
    if name not in CHIPS:
        raise ConfigError(
            f"{found.topology}: the rates of {name} are not known; plan for "
            f"{' or '.join(CHIPS)}"
        )
    return CHIPS[name]


def peak_flops_per_s(device_kind: str) -> float | None:
    """Return the peak of a chip by the name that JAX has for it; None if that is not in
    the table."""
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds:
            return chip.flops_per_s
    return None


def ici_bytes_per_s(found: Slice) -> float:
    """Return the bytes per second that one chip can send to its neighbours.

    A ring axis has two links per chip, a line has one, and an axis of one chip has
    none. The result is 0 for a single chip.
    """
    chip = chip_of(found)
    axes = found.axes
    rings = [axis % chip.wraps_from == 0 for axis in axes]
    if chip.wraps_together:
        rings = [all(rings)] * len(axes)
    used = sum(
        0 if axis == 1 else 2 if ring else 1
        for axis, ring in zip(axes, rings, strict=True)
    )
    return chip.ici_bytes_per_s * used / chip.links
