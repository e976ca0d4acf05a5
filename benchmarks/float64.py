"""The laboratory beside `emulate`, both in float64: all Theta within 1e-9.

In float32 both round in other places, and a codec makes steps of it. So this process
computes everything in float64: every module of the package has numpy and jax in which
float32 is float64, and its bits uint64. Then only a different algorithm is left to see.

Command: `python benchmarks/float64.py rda,int8,int8,keep ...`, a merge rule, a codec up
and down, and an adopt rule each; `covering` for each of them once, `all` for their
complete product. It prints the largest difference of each, and exits with 1 if one is
above the bound. 400 cases take about half an hour of a core.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

BOUND = 1e-9
ISLANDS, CYCLES, STEPS = 4, 6, 3
"""STEPS: of a cycle. The guard of the outer step acts from the fourth merge on."""
WIDTH, LENGTH = 16, 16
RULES = ("rda", "mean", "trimmed_mean", "clipped_mean")
CODECS = ("f32", "bf16", "int8", "int4", "int2")
ADOPTS = ("keep", "rebase", "overwrite", "blend")
COVERING = (
    ("rda", "int8", "int8", "keep"),
    ("mean", "bf16", "int4", "rebase"),
    ("trimmed_mean", "int4", "f32", "overwrite"),
    ("clipped_mean", "f32", "bf16", "blend"),
    ("rda", "int2", "int2", "rebase"),
)
"""Each of them at least once."""


class Wide:
    """numpy or jax.numpy, with 64 bits where it has 32."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        wide = {"float32": "float64", "uint32": "uint64"}
        return getattr(self._module, wide.get(name, name))


def widen() -> None:
    """Make every loaded module of the package compute in float64."""
    import jax.numpy as jnp
    import numpy as np

    from diloco_jax.core import codecs

    for name, module in list(sys.modules.items()):
        if name.startswith("diloco_jax."):
            for short, plain in (("np", np), ("jnp", jnp)):
                if getattr(module, short, None) is plain:
                    setattr(module, short, Wide(plain))
    codecs.F32 = codecs.Floats(jnp.float64)


def model(run: Any, island: Any, layout: Any) -> Any:
    """A model of bytes with an embedding, stacked layers and vectors.

    One vector never moves: its deltas have no direction.
    """
    import jax
    import jax.numpy as jnp

    from diloco_jax.models.model import Model, split_batch, weighted_loss

    def init(key: Any) -> Any:
        keys = iter(jax.random.split(key, 2))

        def drawn(*shape: int) -> Any:
            return 0.3 * jax.random.normal(next(keys), shape, jnp.float64)

        return {
            "bytes": drawn(256, WIDTH),
            "idle": jnp.zeros((WIDTH,), jnp.float64),
            "mix": drawn(2, WIDTH, WIDTH),
            "scale": jnp.ones((WIDTH,), jnp.float64),
            "shift": jnp.zeros((WIDTH,), jnp.float64),
        }

    def loss(params: Any, batch: Any) -> Any:
        inputs, targets, weights = split_batch(batch)
        x = params["bytes"][inputs]
        for layer in range(2):
            x = x + jnp.tanh(x @ params["mix"][layer])
        x = x * params["scale"] + params["shift"]
        logits = jax.nn.log_softmax(x @ params["bytes"].T)
        losses = -jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return weighted_loss(losses, weights.astype(jnp.float64))

    axes = {
        "bytes": ("vocab", "embed"),
        "idle": ("embed",),
        "mix": ("layers", None, "embed"),
        "scale": ("embed",),
        "shift": ("embed",),
    }
    return Model(init, loss, axes)


def difference(text: str, rule: str, up: str, down: str, adopt: str) -> float:
    """Return the largest difference of an element of Theta after six cycles."""
    import jax
    import numpy as np

    from diloco_jax import EmulationOptions, emulate
    from diloco_jax.config import (
        Config,
        DataConfig,
        InnerConfig,
        IslandConfig,
        ModelConfig,
        OuterConfig,
        Placement,
        RunConfig,
        SyncConfig,
    )
    from diloco_jax.simulation import laboratory

    sync = SyncConfig(
        merge=rule,
        codec_up=up,
        codec_down=down,
        adopt=adopt,
        steps_per_cycle=STEPS,
        fragments=3,
        overlap_steps=2,
    )
    momentum = OuterConfig(optimizer="nesterov", learning_rate=0.7, momentum=0.9)
    plain = OuterConfig(optimizer="sgd", learning_rate=1.0, norm_guard=1.01)
    tokens = CYCLES * STEPS * ISLANDS * 2 * LENGTH
    config = Config(
        run=RunConfig(
            model=ModelConfig(factory=f"{__file__}:model"),
            data=DataConfig(paths=(text,), validation_fraction=0.2),
            inner=InnerConfig(learning_rate=1e-2),
            outer=plain if adopt == "rebase" else momentum,
            sync=sync,
            sequence_length=LENGTH,
            total_tokens=tokens,
        ),
        islands={
            f"i{n}": IslandConfig(batch_size=2, step_seconds=1.0)
            for n in range(ISLANDS)
        },
        placement=Placement(merge_route="xla"),
    )
    options = EmulationOptions(merge_seconds=1.5)
    one = emulate(config.replace("seed", 1), options=options).params
    runs = laboratory.run(config, seeds=(0, 1), options=options).runs
    apart = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one, runs[1].params)
    assert {leaf.dtype for leaf in jax.tree.leaves(one)} == {np.dtype("float64")}
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), one, runs[0].params)
    assert max(jax.tree.leaves(moved)) > 1e-3, "two seeds are one"
    return float(np.max(jax.tree.leaves(apart)))  # NaN where one is.


def main() -> int:
    """Compare the cases of the command line."""
    os.environ.update(JAX_ENABLE_X64="1", JAX_PLATFORMS="cpu")
    import support

    parser = support.parser(__doc__ or "")
    parser.add_argument("cases", nargs="+", help="RULE,UP,DOWN,ADOPT, covering or all")
    options = parser.parse_args()
    sets = {
        "all": itertools.product(RULES, CODECS, CODECS, ADOPTS),
        "covering": COVERING,
    }
    cases = [
        case
        for given in options.cases
        for case in sets.get(given, [tuple(given.split(","))])
    ]
    from diloco_jax.simulation import laboratory  # noqa: F401

    widen()
    found = {}
    with tempfile.TemporaryDirectory() as text:
        words = " ".join(str(n * n % 997) for n in range(4000))
        (Path(text) / "a.txt").write_text(words)
        (Path(text) / "b.txt").write_text(words[::-1])
        for case in cases:
            found[",".join(case)] = difference(text, *case)
    print(json.dumps(found))
    return int(not all(value <= BOUND for value in found.values()))


if __name__ == "__main__":
    sys.exit(main())
