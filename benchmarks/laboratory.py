"""The laboratory beside `emulate`: the same Theta, the same loss, and its speed.

Question: does a laboratory, which has all seeds and islands in one program, learn what
`emulate` learns, and how fast is it beside that and beside the products of matrices
alone?

Theta is compared in float64 (`float64.py`) after six cycles of four islands, for
every merge rule, codec up, codec down and adopt rule. Losses are compared in float32,
seed by seed, after a whole run of 8 equal islands with H = P = 12 (`quality.py`'s
`0.04m`). Speeds are tokens per second of all seeds together: of a laboratory without
its first cycle, of `emulate` over whole runs, all but the first, which compiles. The
limit is what the same device takes for the products of a step (`models/flops.py`), at
the rate of one large product of f32 matrices, or of bf16 with `--dtype bfloat16`.

Prediction: 1e-9 in all cases; losses alike within 0.25 %; on a CPU no faster than
`emulate`, on a GPU at least ten times as fast.

Command: `python -m benchmarks.laboratory`; `--platform cuda` on a GPU, `--no-float64`
without the comparison of Theta. Cost: about 40 minutes on two cores, 20 of them for
float64; `--quick` 4 minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import float64
import quality_configs
import quality_report
import support

SEEDS = 10
LOSS_MAX_PERCENT = 0.25
GPU_SPEEDUP_MIN = 10.0
SIDE, REPEATS = 2048, 8
QUICK_TOKENS = 60_000


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--platform", default="cpu", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--size", default="0.04m", choices=quality_configs.SIZES)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--tokens", type=int, default=0, help="if not the size's")
    parser.add_argument("--text", nargs="*", default=[], help="the corpus")
    parser.add_argument("--no-float64", action="store_true", help="not Theta")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = options.platform
    if options.quick:
        options.seeds = min(options.seeds, 2)
    checks = []
    thetas = {} if options.no_float64 else in_float64(quick=options.quick)
    if thetas:
        worst = max(thetas, key=lambda case: (math.isnan(thetas[case]), thetas[case]))
        checks.append(
            support.at_most(
                f"difference of Theta in float64, largest of {len(thetas)} cases "
                f"({worst})",
                *(thetas[worst], float64.BOUND, ".1e"),
            )
        )
    found = compared(options)
    losses = {name: dict(enumerate(found[name])) for name in ("laboratory", "emulate")}
    apart = quality_report.difference(losses, "laboratory", "emulate")
    assert apart is not None, "there is a seed"
    mean, half, _ = apart
    what = "mean difference of losses, either way, percent"
    checks.append(support.at_most(what, abs(mean), LOSS_MAX_PERCENT, ".4f"))
    rates = found["tokens_per_second"]
    if options.platform == "cuda":
        over = rates["laboratory"] / rates["emulate"]
        checks.append(support.at_least("speed over emulate", over, GPU_SPEEDUP_MIN))
    rows = [
        {
            "what": what,
            "tokens/s": f"{rate:,.0f}",
            "of the limit": f"{rate / rates['products alone']:.3f}",
        }
        for what, rate in rates.items()
    ]
    tables = {
        f"Speed, {options.seeds} seeds, {found['device']}": rows,
        "Losses": [
            {
                "seeds": options.seeds,
                "mean difference, percent": f"{mean:+.4f}",
                "95 %": f"+-{half:.4f}",
            }
        ],
    }
    raw = {"float64": thetas, **found}
    return support.deliver(options, "laboratory", __doc__, tables, checks, raw)


def in_float64(*, quick: bool) -> dict[str, float]:
    """Return the largest difference of Theta by case, from a process of its own."""
    done = subprocess.run(
        [sys.executable, float64.__file__, "covering" if quick else "all"],
        stdout=subprocess.PIPE,
        check=False,  # 1 says that a bound is broken, which the page says too.
    )
    told: dict[str, float] = json.loads(done.stdout)
    return told


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """Return losses by seed and speeds of the laboratory and of `emulate`."""
    import jax

    from diloco_jax import emulate
    from diloco_jax.models.flops import analytic_flops
    from diloco_jax.simulation import laboratory

    size = quality_configs.SIZES[options.size]
    config = quality_configs.config(size).replace("data.paths", tuple(options.text))
    for name in config.islands:
        config = config.replace(f"islands.{name}.compute_dtype", options.dtype)
    if tokens := options.tokens or QUICK_TOKENS * options.quick:
        config = config.replace("total_tokens", tokens)
    network, seeds = quality_configs.network(2), range(options.seeds)
    found = laboratory.run(
        config,
        seeds=seeds,
        options=network,
        show=lambda line: print(line, file=sys.stderr),
    )
    losses, seconds = [], []
    for seed in seeds:
        began = time.monotonic()
        summary = emulate(config.replace("seed", seed), options=network).summary
        seconds.append(time.monotonic() - began)
        losses.append(summary["eval_loss"])
    tokens = config.run.total_tokens
    flops = analytic_flops(size.model, size.sequence) / size.sequence
    return {
        "laboratory": found.losses.tolist(),
        "emulate": losses,
        "tokens_per_second": {
            "laboratory": found.tokens_per_second,
            "emulate": tokens / statistics.median(seconds[1:] or seconds),
            "products alone": product_rate(options.dtype) / flops,
        },
        "laboratory_seconds": found.seconds,
        "emulate_seconds": seconds,
        "device": jax.devices()[0].device_kind,
    }


def product_rate(dtype: str) -> float:
    """Return FLOP/s of the fastest of some products of square matrices."""
    import jax
    import jax.numpy as jnp

    one = jnp.ones((SIDE, SIDE), dtype)
    product = jax.jit(jnp.matmul)
    product(one, one).block_until_ready()
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        product(one, one).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / min(seconds)


if __name__ == "__main__":
    support.script(main)
