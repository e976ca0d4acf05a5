"""One island of a run, as of the newest line about it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from diloco_jax.hardware.chips import peak_flops_per_s

AXES = ("mesh_data", "mesh_fsdp", "mesh_tensor")


@dataclasses.dataclass(kw_only=True)
class Lane:
    """One island as of the newest line about it, summed over nothing."""

    name: str
    row: int
    state: str = ""
    """One of `timeline.STATES`; empty: it is not in the run."""
    since: float = 0.0
    """Time up to which its states are in the grid."""
    gap: float = 0.0
    """Time at which the coordinator last heard of it before it was away itself."""
    incarnation: int = 0
    tokens_per_step: int = 0
    median_step_seconds: float = 0.0
    device: str = ""
    stands_for: str = ""
    peak_flops_per_s: float = 0.0
    """Sum over all its devices; 0 if the tables of `diloco plan` do not know them."""
    steps: int = 0
    told: float = 0.0
    """Time of its last line of metrics."""
    counts: dict[str, float] = dataclasses.field(default_factory=dict)
    adopted: dict[int, int] = dataclasses.field(default_factory=dict)
    """Version by fragment, and their sum."""
    adoptions: int = 0
    out: dict[int, int] = dataclasses.field(default_factory=dict)
    """Tick by fragment of takes without a verdict."""
    out_since: float = 0.0

    def hello(self, line: Mapping[str, Any]) -> None:
        """Take what an incarnation says of its devices."""
        config = line["config"]
        self.device = str(line["environment"].get("device_kind", ""))
        self.stands_for = str(config.get("stands_for", ""))
        devices = math.prod(int(config.get(axis, 1)) for axis in AXES)
        self.peak_flops_per_s = devices * (peak_flops_per_s(self.device) or 0.0)
