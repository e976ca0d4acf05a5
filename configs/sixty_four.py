"""12 billion parameters on 64 islands in four regions: a case on paper.

Purpose: what the coordinator of a large fleet needs: 16 cubes of v5p in each of two
regions, and 16 pods of v6e in each of two others. Nothing of this was run.
Cost: 10,240 chips, and five machines for the coordinator; the plan by arithmetic,
seconds on one CPU core. Its islands are those of configs/mixed_12b.py.
Expected: docs/results/plan.md; all checks hold on links of 2 Gbit/s. More hosts may
begin transfers together than a port has places for, so some wait their turn.
Command: `diloco plan configs/sixty_four.py --arithmetic --link-gbit-per-s 2`.
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
REGIONS = {
    "central": (V5P, "us-central1-a"),
    "east": (V6E, "us-east1-d"),
    "ohio": (V5P, "us-east5-a"),
    "europe": (V6E, "europe-west4-a"),
}
EACH = 16


def config() -> Config:
    """The run."""
    places = {
        f"{region}-{number:02}": place
        for region, place in REGIONS.items()
        for number in range(EACH)
    }
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
            total_tokens=2_000_000_000_000,
        ),
        islands={name: island for name, (island, _) in places.items()},
        placement=Placement(
            time_budget_s=60.0,
            workers=4,
            merge_buffer_bytes=48 << 30,
            snapshot_every_s=400.0,
        ),
        launch=LaunchConfig(
            name="sixty-four",
            zones={name: zone for name, (_, zone) in places.items()},
            coordinator_zone="us-central1-a",
            coordinator_machine="n2-highmem-16",
            coordinator_disk_gb=2000,
        ),
    )
