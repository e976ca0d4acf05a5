"""Five small slices, one of each generation of TPU, training one model.

Purpose: one plan and one model for v4, v5e, v5p, v6e and TPU7x, whose chips are two
devices each. All five are compiled for; none of this has run on a chip.
Cost: five machines of four chips; the plan, minutes on two CPU cores.
Expected: docs/results/plan.md. Steps of so small a model would be over before a delta
is on its way: they are slowed to 36 to 50 ms, in proportion to what they would take.
Command: `diloco plan configs/mixed_five.py`; without any TPU, in virtual time, `diloco
emulate configs/mixed_five.py --total-tokens 2e5`.
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


def island(topology: str, batch_size: int, step_seconds: float) -> IslandConfig:
    """One host of four chips, with a batch or a step after its FLOP/s."""
    return IslandConfig(
        topology=topology,
        batch_size=batch_size,
        mesh_fsdp=8 if topology.startswith("tpu7x") else 4,
        compute_dtype="bfloat16",
        remat="full",
        step_seconds=step_seconds,
    )


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
            "v4": island("v4:2x2x1", 4, 0.036),
            "v5e": island("v5e:2x2", 4, 0.05),
            "v5p": island("v5p:2x2x1", 8, 0.043),
            "v6e": island("v6e:2x2", 16, 0.043),
            "tpu7x": island("tpu7x:2x2x1", 40, 0.043),
        },
        launch=LaunchConfig(
            name="mixed-five",
            zones={
                "v4": "us-central2-b",
                "v5e": "us-central1-a",
                "v5p": "us-central1-a",
                "v6e": "us-central1-b",
                "tpu7x": "us-central1-c",
            },
            coordinator_zone="us-central1-a",
        ),
    )
