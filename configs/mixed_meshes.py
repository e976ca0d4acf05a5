"""Three islands with unlike meshes, one of them of two host processes.

Purpose: islands that are cut in different ways train one model: 2 hosts x 2 devices
(fsdp), one host x 4 devices (fsdp 2 x tensor 2), one device. On a machine without
accelerators every device is a virtual CPU device.
Cost: about two to three minutes on two CPU cores.
Expected: the three islands' shares of the merged tokens are those of their batches.
Command: `diloco run configs/mixed_meshes.py`
"""

from diloco_jax.config import (
    Config,
    InnerConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.models.presets import preset


def config() -> Config:
    """The run."""
    return Config(
        run=RunConfig(
            model=preset("0.3m"),
            inner=InnerConfig(learning_rate=3e-3),
            sync=SyncConfig(steps_per_cycle=8, fragments=4),
            sequence_length=64,
            total_tokens=200_000,
        ),
        islands={
            "two-hosts": IslandConfig(
                batch_size=8, hosts=2, mesh_fsdp=4, step_seconds=0.5
            ),
            "four-devices": IslandConfig(
                batch_size=8, mesh_fsdp=2, mesh_tensor=2, step_seconds=0.5
            ),
            "one-device": IslandConfig(batch_size=4, step_seconds=0.5),
        },
        placement=Placement(time_budget_s=20.0),
    )
