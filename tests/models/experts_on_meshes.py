"""Run by test_experts.py in a process of its own; prints what it saw as JSON.

Four virtual CPU devices train a mixture of experts on several meshes.
"""

import dataclasses
import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax import emulate
from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.island.device.build import build_trainer
from diloco_jax.island.device.step import TrainState
from diloco_jax.models import experts, transformer
from diloco_jax.models.presets import preset

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from float64 import widen

RUN = RunConfig(
    model=preset("tiny_experts"),
    data=DataConfig(arrays=("tokens", "segments")),
    sequence_length=16,
    inner=InnerConfig(optimizer="sgd", weight_decay=0.0),
)
SEGMENTS = np.ones((8, 17), np.int32)
SEGMENTS[3, 9:] = 2
SEGMENTS[5:, 4:] = 0


SHAPES = ("1x1x1x1", "2x2x1x1", "1x2x1x2", "1x1x2x1", "1x1x4x1", "1x2x2x1", "1x1x2x2")


def train(shape: str) -> tuple[dict, list[np.ndarray]]:
    """Losses of three steps, how the first batch was routed, and the parameters.

    shape: data x fsdp x expert x tensor.
    """
    data, fsdp, expert, tensor = map(int, shape.split("x"))
    island = IslandConfig(
        batch_size=8,
        mesh_data=data,
        mesh_fsdp=fsdp,
        mesh_expert=expert,
        mesh_tensor=tensor,
        remat="full",
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
    # A device sorts its own rows, and those that may come to its experts.
    rows = 8 * 16 * RUN.model.experts_per_token // (data * fsdp)
    sorts = re.findall(r"= \(\w+\[(\d+)\].* sort\(", compiled.as_text())
    found = {
        "losses": losses,
        "expert_tokens": np.asarray(metrics["expert_tokens"]).tolist(),
        "sorts_over_the_mesh": [n for n in map(int, sorts) if n > rows],
        "sorts": len(sorts),
    }
    return found, [np.array(leaf) for leaf in jax.tree.leaves(state.params)]


def run_all() -> dict:
    """All meshes, each against one device."""
    seen = {shape: train(shape) for shape in SHAPES}
    one = seen["1x1x1x1"][1]
    return {
        shape: {
            **found,
            "distance": max(
                float(np.abs(a - b).max()) for a, b in zip(own, one, strict=True)
            ),
        }
        for shape, (found, own) in seen.items()
    }


def attend(layout, query, key, value, window=0, segments=None):
    """Plain causal attention."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    odds = jnp.einsum("btnh,bsnh->bnts", query, key) / query.shape[3] ** 0.5
    seen = jnp.tril(jnp.ones(odds.shape[2:], bool))
    shares = jax.nn.softmax(jnp.where(seen, odds, -jnp.inf))
    return jnp.einsum("bnts,bsnh->btnh", shares, value)


def merged_in_double_precision() -> dict[str, float]:
    """Largest difference of merged parameters of two islands, whose experts 2 devices
    share and 4, from those of islands on one; and the smallest margin by which a router
    chose.

    Everything is in float64, as in `benchmarks/float64.py`.
    """
    jax.config.update("jax_enable_x64", True)
    widen()
    transformer.DTYPES["float32"] = jnp.float64
    transformer.ATTENTION["auto"] = attend  # That of jax has its softmax in f32.
    margins, route = [], experts.route

    def watched(config, x, real, router):
        odds, *rest = route(config, x, real, router)
        best = jax.lax.top_k(odds, config.experts_per_token + 1)[0]
        jax.debug.callback(margins.append, jnp.min(best[:, -2] - best[:, -1]))
        return odds, *rest

    found = []
    with tempfile.TemporaryDirectory() as text:
        words = " ".join(str(n * n % 997) for n in range(2000))
        for name in ("a", "b"):
            (Path(text) / f"{name}.txt").write_text(words + name)
        for ways in ((1, 1), (2, 4)):
            experts.route = watched if ways == (1, 1) else route
            run = dataclasses.replace(
                RUN,
                data=DataConfig(paths=(text,), validation_fraction=0.2),
                inner=InnerConfig(
                    optimizer="sgd", learning_rate=0.1, arguments=(("momentum", 0.9),)
                ),
                sync=SyncConfig(
                    codec_up="f32", codec_down="f32", steps_per_cycle=5, fragments=2
                ),
                total_tokens=10 * 2 * 4 * 16,
            )
            islands = {
                f"i{number}": IslandConfig(
                    batch_size=4, mesh_expert=own, step_seconds=1.0
                )
                for number, own in enumerate(ways)
            }
            placement = Placement(merge_route="xla")
            config = Config(run=run, islands=islands, placement=placement)
            found.append(emulate(config).params)
    leaves = [jax.tree.leaves(params) for params in found]
    assert {leaf.dtype for leaf in leaves[0]} == {np.dtype("float64")}
    apart = max(float(np.abs(a - b).max()) for a, b in zip(*leaves, strict=True))
    return {"apart": apart, "margin": float(min(margins))}


if __name__ == "__main__":
    print(json.dumps({"meshes": run_all(), "merged": merged_in_double_precision()}))
