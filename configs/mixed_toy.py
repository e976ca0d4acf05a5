"""Two small slices of two generations, a v5p and a v6e host, training one model.

Purpose: the smallest run on real TPUs that mixes generations, and the plan that shows
what `diloco plan` does within half a minute, without a TPU.
Cost: two machines of four chips; the plan, half a minute on two CPU cores.
Expected: docs/results/plan.md. Steps of so small a model would be over before a delta
is on its way: they are slowed to 50 ms.
Command: `diloco plan configs/mixed_toy.py`; with `--launch.project`, `--launch.image`
and the like, `diloco launch configs/mixed_toy.py --on sky`.
"""

from diloco_jax.config import (
    Config,
    InnerConfig,
    IslandConfig,
    LaunchConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.models.presets import preset


def config() -> Config:
    """The run."""
    return Config(
        run=RunConfig(
            model=preset("2m"),
            inner=InnerConfig(learning_rate=2e-3),
            sync=SyncConfig(steps_per_cycle=40, fragments=10, overlap_steps=8),
            sequence_length=128,
            total_tokens=40_000_000,
        ),
        islands={
            # Per chip a v6e has twice the FLOP/s of a v5p.
            "v5p": IslandConfig(
                topology="v5p:2x2x1",
                batch_size=8,
                mesh_fsdp=4,
                compute_dtype="bfloat16",
                remat="full",
                step_seconds=0.05,
            ),
            "v6e": IslandConfig(
                topology="v6e:2x2",
                batch_size=16,
                mesh_fsdp=4,
                compute_dtype="bfloat16",
                remat="full",
                step_seconds=0.05,
            ),
        },
        launch=LaunchConfig(
            name="mixed-toy", zones={"v5p": "us-east5-a", "v6e": "us-east5-b"}
        ),
    )
