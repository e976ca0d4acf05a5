"""The fastest possible step, by the published rates of the chips.

Each resource has a time of its own. Work that overlaps costs as much time as the
longest part. Collectives that the compiler did not make asynchronous come on top,
because the chip waits for them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from diloco_jax.hardware.chips import chip_of, ici_bytes_per_s
from diloco_jax.hardware.slices import Slice
from diloco_jax.planning.collectives import CollectiveSum

Resource = Literal["compute", "hbm", "ici"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds of one step by resource, and the rates that follow."""

    compute_seconds: float
    hbm_seconds: float
    ici_seconds: float
    """Seconds of all collectives."""
    waiting_seconds: float
    """Seconds of the collectives that overlap with nothing, part of `ici_seconds`."""
    binding: Resource
    """The resource that takes longest."""
    step_seconds: float
    """The longest of the overlapping times plus the waiting time."""
    model_flops_utilisation: float
    """Share of the peak rate that forward and backward pass reach in that step."""


def roofline(
    found: Slice,
    *,
    model_flops: float,
    executed_flops: float,
    hbm_bytes: int,
    collectives: list[CollectiveSum],
) -> Roofline:
    """Return the roofline of one step.

    flops: of the whole island; bytes: of one chip.
    """
    chip = chip_of(found)
    sent = sum(c.sent_bytes for c in collectives)
    hidden = sum(c.overlapping_bytes for c in collectives)
    seconds: dict[Resource, float] = {
        "compute": executed_flops / found.chips / chip.flops_per_s,
        "hbm": hbm_bytes / chip.hbm_bytes_per_s,
        "ici": ici_seconds(found, sent),
    }
    waiting = ici_seconds(found, sent - hidden)
    overlapped = seconds["ici"] - waiting
    step = max(seconds["compute"], seconds["hbm"], overlapped) + waiting
    return Roofline(
        compute_seconds=seconds["compute"],
        hbm_seconds=seconds["hbm"],
        ici_seconds=seconds["ici"],
        waiting_seconds=waiting,
        binding=max(seconds, key=lambda name: seconds[name]),
        step_seconds=step,
        model_flops_utilisation=model_flops / found.chips / chip.flops_per_s / step,
    )


def ici_seconds(found: Slice, sent_bytes: float) -> float:
    """Return the seconds in which a chip sends this many bytes over all its links."""
    return sent_bytes / ici_bytes_per_s(found) if sent_bytes else 0.0
