"""12 billion parameters over four regions, an island in each.

Purpose: the published setting, four regions with links of 2 to 5 Gbit/s, on two cubes
of v5p and two pods of v6e.
Cost: 640 chips; the plan, as long as that of configs/mixed_12b.py, whose islands these
are.
Expected: docs/results/plan.md; on 2 Gbit/s all checks of the plan hold.
Command: `diloco plan configs/four_regions.py --link-gbit-per-s 2`.
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

V5P = IslandConfig(
    topology="v5p:4x4x4",
    batch_size=64,
    mesh_data=4,
    mesh_fsdp=16,
    compute_dtype="bfloat16",
    remat="full",
)
V6E = IslandConfig(
    topology="v6e:16x16",
    batch_size=512,
    mesh_data=4,
    mesh_fsdp=64,
    compute_dtype="bfloat16",
    remat="full",
)


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
        islands={"east": V5P, "central": V6E, "west": V6E, "europe": V5P},
        placement=Placement(
            time_budget_s=60.0,
            merge_buffer_bytes=32 << 30,
            snapshot_every_s=400.0,
        ),
        launch=LaunchConfig(
            name="four-regions",
            zones={
                "east": "us-east5-a",
                "central": "us-central1-b",
                "west": "us-west1-c",
                "europe": "europe-west4-a",
            },
            coordinator_zone="us-east5-b",
            coordinator_machine="n2-highmem-48",
            coordinator_disk_gb=2500,
        ),
    )
