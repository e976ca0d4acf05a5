"""12 billion parameters on a v5p cube and a v6e pod, a thousand kilometres apart.

Purpose: the reference case of a mixed fleet: 64 chips of v5p and 256 of v6e train one
model over ordinary links.
Cost: 320 chips; the plan, some minutes on two CPU cores.
Expected: docs/results/plan.md. Both steps take about as long, since the batches are as
the slices' FLOP/s; the text is to be replaced by one that is worth it.
Command: `diloco plan configs/mixed_12b.py`; with `--launch.project`, `--launch.image`
and the like, `diloco launch configs/mixed_12b.py --on sky`.
"""

from diloco_jax.config import (
    Config,
    InnerConfig,
    IslandConfig,
    LaunchConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.models.presets import preset


def config() -> Config:
    """The run."""
    return Config(
        run=RunConfig(
            model=preset("12b"),
            inner=InnerConfig(learning_rate=2e-4),
            sync=SyncConfig(
                steps_per_cycle=96,
                fragments=48,
                overlap_steps=4,
                codec_up="int4",
                codec_down="int4",
            ),
            sequence_length=4096,
            total_tokens=250_000_000_000,
        ),
        islands={
            "v5p": IslandConfig(
                topology="v5p:4x4x4",
                batch_size=64,
                mesh_data=4,
                mesh_fsdp=16,
                compute_dtype="bfloat16",
                remat="full",
            ),
            "v6e": IslandConfig(
                topology="v6e:16x16",
                batch_size=512,
                mesh_data=4,
                mesh_fsdp=64,
                compute_dtype="bfloat16",
                remat="full",
            ),
        },
        # Rounds of snapshots that the disk has time for. Leases last through a restart
        # of the coordinator, which reads 141 GB, by themselves.
        placement=Placement(
            time_budget_s=60.0,
            merge_buffer_bytes=32 << 30,
            snapshot_every_s=400.0,
        ),
        launch=LaunchConfig(
            name="mixed-12b",
            zones={"v5p": "us-east5-a", "v6e": "us-central1-b"},
            coordinator_zone="us-east5-b",
            coordinator_machine="n2-highmem-48",
            coordinator_disk_gb=2000,
        ),
    )
