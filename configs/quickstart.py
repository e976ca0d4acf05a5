"""The first run: three unequal islands, one of which is killed and comes back.

Purpose: see one model trained by a v6e slice and two v5p slices that differ in batch
size and speed, and what it costs when one of them dies in mid-run.
Cost: at the given step times 250 s of training on two CPU cores, after compilation;
nothing is downloaded (the text is the Python standard library's own sources).
Expected: validation loss about 1.41 nats per byte; the killed island merges again
within a cycle of its return, the others do not notice (docs/results/quickstart.md).
Command: `diloco run configs/quickstart.py` (or `bash launch/local.sh`); with
`--baseline` it is compared with plain training on as many tokens.
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
            # Muon costs less when it is merged than Adam does, and learns faster here.
            inner=InnerConfig(optimizer="muon", learning_rate=6e-3),
            sync=SyncConfig(steps_per_cycle=4, fragments=4, quorum=2),
            sequence_length=128,
            total_tokens=1_600_000,
        ),
        islands={
            # Batches as unequal as such slices are; the step times leave two cores
            # with slack.
            "v6e": IslandConfig(batch_size=16, step_seconds=0.5, stands_for="v6e-16"),
            "v5p-a": IslandConfig(batch_size=4, step_seconds=0.4, stands_for="v5p-8"),
            "v5p-b": IslandConfig(batch_size=4, step_seconds=0.4, stands_for="v5p-8"),
        },
        placement=Placement(faults=("v5p-b@200:kill",), baseline_learning_rate=8e-3),
    )
