"""A trillion parameters on 64 islands: a case on paper.

Purpose: what a coordinator of several machines can hold. Nothing of this was compiled.
Cost: 131,072 chips, and 17 machines for the coordinator; the plan by arithmetic, some
seconds on one CPU core.
Expected: docs/results/plan.md; all checks hold. One process would lack memory and disk.
Bandwidth of the coordinator's machines is not published, and so not checked.
Command: `diloco plan configs/paper_1t.py --arithmetic`.
"""

from diloco_jax.config import (
    Config,
    InnerConfig,
    IslandConfig,
    LaunchConfig,
    ModelConfig,
    Placement,
    RunConfig,
    SyncConfig,
)

ISLAND = IslandConfig(
    topology="v5p:8x16x16",
    batch_size=2048,
    mesh_data=8,
    mesh_fsdp=256,
    compute_dtype="bfloat16",
    remat="full",
)


def config() -> Config:
    """The run."""
    return Config(
        run=RunConfig(
            model=ModelConfig(
                vocab_size=262_144,
                tied_embeddings=True,
                d_model=20_480,
                num_layers=165,
                num_heads=80,
                num_kv_heads=16,
                head_dim=256,
                mlp_dim=81_920,
            ),
            inner=InnerConfig(learning_rate=1e-4),
            sync=SyncConfig(
                steps_per_cycle=96,
                fragments=48,
                overlap_steps=4,
                codec_up="int4",
                codec_down="int4",
            ),
            sequence_length=8192,
            total_tokens=20_000_000_000_000,
        ),
        islands={f"island-{i:02}": ISLAND for i in range(64)},
        placement=Placement(
            time_budget_s=600.0, workers=16, merge_buffer_bytes=12 << 40
        ),
        launch=LaunchConfig(
            name="paper-1t",
            zones={f"island-{i:02}": "us-east5-a" for i in range(64)},
            coordinator_zone="us-east5-b",
            coordinator_machine="m3-ultramem-128",
            coordinator_disk_gb=60_000,
        ),
    )
