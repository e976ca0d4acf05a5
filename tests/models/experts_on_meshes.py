"""Run by test_experts.py in a process of its own; prints what it saw as JSON.

Four virtual CPU devices train a mixture of experts on several meshes.
"""

import json
import re

import jax
import numpy as np

from diloco_jax.config import DataConfig, InnerConfig, IslandConfig, RunConfig
from diloco_jax.island.device.build import build_trainer
from diloco_jax.island.device.step import TrainState
from diloco_jax.models.presets import preset

RUN = RunConfig(
    model=preset("tiny_experts"),
    data=DataConfig(arrays=("tokens", "segments")),
    sequence_length=16,
    inner=InnerConfig(optimizer="sgd", weight_decay=0.0),
)
SEGMENTS = np.ones((8, 17), np.int32)
SEGMENTS[3, 9:] = 2
SEGMENTS[5:, 4:] = 0


def train(shape: str) -> tuple[dict, list[np.ndarray]]:
    """Losses of three steps, how the first batch was routed, and the parameters.

    shape: data x fsdp x tensor.
    """
    data, fsdp, tensor = map(int, shape.split("x"))
    island = IslandConfig(
        batch_size=8, mesh_data=data, mesh_fsdp=fsdp, mesh_tensor=tensor, remat="full"
    )
    model, trainer = build_trainer(RUN, island)
    params = trainer.place_params(jax.jit(model.init)(jax.random.key(0)))
    tokens = np.random.default_rng(0).integers(1, 256, (3, 8, 17)).astype(np.int32)
    batches = [{"tokens": own, "segments": SEGMENTS} for own in tokens]
    with jax.set_mesh(trainer.mesh):
        lowered = jax.jit(model.loss).lower(params, trainer.put_batch(batches[0]))
        compiled = lowered.compile()
        _, metrics = compiled(params, trainer.put_batch(batches[0]))
    state, losses = TrainState(params, trainer.init_inner(params)), []
    for batch in batches:
        state, told = trainer.step(state, trainer.put_batch(batch), 0.1)
        losses.append(float(told["loss"]))
    rows = 8 * 16 * RUN.model.experts_per_token // (data * fsdp)
    sorts = re.findall(r" sort\(s32\[(\d+)\]", compiled.as_text())
    found = {
        "losses": losses,
        "expert_tokens": np.asarray(metrics["expert_tokens"]).tolist(),
        "sorts_over_the_mesh": [n for n in map(int, sorts) if n > rows],
        "sorts": len(sorts),
    }
    return found, [np.array(leaf) for leaf in jax.tree.leaves(state.params)]


def run_all() -> dict:
    """All meshes, each against one device."""
    seen = {shape: train(shape) for shape in ("1x1x1", "2x2x1", "1x2x2", "4x1x1")}
    one = seen["1x1x1"][1]
    return {
        shape: {
            **found,
            "distance": max(
                float(np.abs(a - b).max()) for a, b in zip(own, one, strict=True)
            ),
        }
        for shape, (found, own) in seen.items()
    }


if __name__ == "__main__":
    print(json.dumps(run_all()))
