"""The step on a GPU: its share of the device's rate, beside a compiled PyTorch step.

Question: how much of an accelerator's peak do the model's own products use at a billion
parameters (model FLOP utilization, by the formula of `models/flops.py`,
without what is computed again), and what does a PyTorch step of the same sizes take
there?

Both train a decoder of the preset's sizes in bfloat16 with f32 parameters and AdamW, on
the same shapes, each in a process of its own, PyTorch's first. Its step is that of
`gpu_torch_step.py`: `torch.compile`, fused AdamW, its own attention kernel. `--torch`
is the Python of an environment that has PyTorch.

Prediction: 0.50 or more on an H100, and no slower than PyTorch.

Command: `python -m benchmarks.gpu_step --torch VENV/bin/python`, where there is a GPU.
`--platform cpu --quick` tries the script itself on any machine. Cost: 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import support

from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.models.flops import analytic_flops
from diloco_jax.models.presets import preset

PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12, "L4": 121e12}
"""Dense bfloat16 FLOP/s of the devices whose name has this (NVIDIA's data sheets)."""
MFU_MIN = 0.50
OVER_TORCH_MAX = 1.0
WARM_STEPS = 3
TIMEOUT_S = 1200.0


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--platform", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model", default="llama3_1b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--torch", default="", help="Python that has PyTorch")
    options = parser.parse_args()
    if options.quick:
        options.model, options.batch, options.length = "tiny", 2, 128
        options.steps = 5
    found = {"PyTorch": torch_step(options)} if options.torch else {}
    found["bundled"] = bundled(options)  # It keeps the device's memory.
    flops = options.batch * analytic_flops(preset(options.model), options.length)
    device = found["bundled"]["device"]
    peak = next((p for name, p in PEAKS.items() if name in device), None)
    middle = {name: statistics.median(row["seconds"]) for name, row in found.items()}
    rows = [
        {
            "step": name,
            "versions": row["versions"],
            "seconds": support.spread(row["seconds"], ".4f"),
            "model TFLOP/s": f"{flops / middle[name] / 1e12:.1f}",
            "of the peak": f"{flops / middle[name] / peak:.3f}" if peak else "unknown",
            "first loss": f"{row['loss']:.3f}",
        }
        for name, row in found.items()
    ]
    checks = []
    if peak:
        mfu = flops / middle["bundled"] / peak
        checks.append(support.at_least(f"MFU on {device}", mfu, MFU_MIN))
    if "PyTorch" in found:
        over = middle["bundled"] / middle["PyTorch"]
        checks.append(support.at_most("step over PyTorch's", over, OVER_TORCH_MAX))
    head = f"{options.model}, {options.batch} x {options.length} tokens, {device}"
    return support.deliver(
        options, "gpu_step", __doc__, {head: rows}, checks, {"steps": found}
    )


def bundled(options: argparse.Namespace) -> dict[str, Any]:
    """Time the product's step, in this process."""
    import jax

    jax.config.update("jax_platforms", options.platform)  # type: ignore[no-untyped-call]
    from diloco_jax.island.device.build import build_trainer
    from diloco_jax.island.device.step import TrainState

    run = RunConfig(model=preset(options.model), sequence_length=options.length)
    island = IslandConfig(batch_size=options.batch, compute_dtype="bfloat16")
    _, trainer = build_trainer(run, island)
    params = trainer.first(0)
    state = TrainState(params, trainer.init_inner(params))
    shape = (options.batch, options.length + 1)
    tokens = np.random.default_rng(0).integers(0, run.model.vocab_size, shape)
    batch = trainer.put_batch({"tokens": tokens.astype(np.int32)})
    seconds, losses = [], []
    for _ in range(WARM_STEPS + options.steps):
        began = time.perf_counter()
        state, metrics = trainer.step(state, batch, 1e-4)
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - began)
    device = jax.local_devices()[0].device_kind
    return {
        "seconds": seconds[WARM_STEPS:],
        "loss": losses[0],
        "device": device,
        "versions": f"jax {jax.__version__}",
    }


def torch_step(options: argparse.Namespace) -> dict[str, Any]:
    """Time the PyTorch step, in a process of its own."""
    model = preset(options.model)
    sizes = {
        "vocab": model.vocab_size,
        "width": model.d_model,
        "layers": model.num_layers,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
        "head": model.head_dim,
        "mlp": model.mlp_dim,
        "tied": model.tied_embeddings,
        "batch": options.batch,
        "length": options.length,
        "steps": options.steps,
        "warm": WARM_STEPS,
        "platform": options.platform,
    }
    script = Path(__file__).with_name("gpu_torch_step.py")
    done = subprocess.run(
        [options.torch, str(script), json.dumps(sizes)],
        stdout=subprocess.PIPE,
        timeout=TIMEOUT_S,
        check=True,
    )
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


if __name__ == "__main__":
    support.script(main)
