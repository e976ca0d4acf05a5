"""The memory of a live coordinator.

Question: what does the coordinator's process hold at its start, while it merges and
writes snapshots, and in the life after a kill? `diloco run` on this machine: the
coordinator and two islands that train for real on tiny batches, 87 M parameters in 24
fragments, int8 both ways, snapshots in rounds of 20 s, 64 MB of `merge_buffer_bytes`.
The coordinator is killed once, after half of the merges.

Memory is the peak of the resident set (VmHWM) of each of the coordinator's two lives:
*start* when it has written its address, after a kill with hardly a fragment restored,
*live* at its end. The baseline is taken off: the peak of a coordinator in the same run
of a tiny model, which is the interpreter, its libraries and compiled programs. So is,
from *live*, the merge buffer. What is left is divided by the bytes of the f32
parameters. *Own* is the most that was sampled without mapped files, ten times a second:
what waits on the disk because the merge buffer is full counts as resident, and the
system takes it back when it needs memory.

Prediction: below 3.5 at the first start, below 4.0 live (three arrays, one encoded
publish, 0.25, spare arrays, and a snapshot's).

Before, on the same machine: 4.9 at a start (a draw of all parameters at once), 4.8 live
(anchors of joins kept for six time budgets, four publishes of everything in memory).

Command: `python benchmarks/coordinator_memory.py`. Cost: about 10 minutes on two cores
and 8 GB.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import support
from machine import CoordinatorLives, Life

from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    ModelConfig,
    OuterConfig,
    Placement,
    RunConfig,
    SyncConfig,
)

LARGE = ModelConfig(
    d_model=768, num_layers=10, num_heads=12, num_kv_heads=4, head_dim=64, mlp_dim=3072
)
SMALL = ModelConfig(
    d_model=64, num_layers=10, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128
)
FRAGMENTS, SEQUENCE = 24, 32
START_MAX, LIVE_MAX = 3.5, 4.0
BUFFER_BYTES = 64 << 20
TIMEOUT_S = 1500.0


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--cycles", type=int, default=8)
    options = parser.parse_args()
    base, _ = measure("baseline", SMALL, options.cycles)
    lives, parameters = measure("87 M parameters", LARGE, options.cycles)
    f32 = 4 * parameters
    results: list[dict[str, Any]] = [
        {
            "life": what,
            "start": (life.start - before.start) / f32,
            "live": (life.peak - before.peak - BUFFER_BYTES) / f32,
            "own": (life.own - before.own - BUFFER_BYTES) / f32,
            "seconds": life.seconds,
            "bytes": dataclasses.asdict(life),
        }
        for what, life, before in zip(
            ("a new run", "after a kill"), lives, base, strict=True
        )
    ]
    checks = [
        support.at_most("a new run: start", results[0]["start"], START_MAX),
        *(support.at_most(f"{r['life']}: live", r["live"], LIVE_MAX) for r in results),
    ]
    return support.write_results(
        options.out,
        "coordinator_memory",
        __doc__,
        {"Lives": [row(result) for result in results]},
        checks,
        {
            "parameters": parameters,
            "baseline": [dataclasses.asdict(life) for life in base],
            "lives": results,
        },
    )


def measure(label: str, model: ModelConfig, cycles: int) -> tuple[list[Life], int]:
    """Return the coordinator's lives in one run, and the number of parameters."""
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        text = Path(folder) / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 20_000)
        config = config_of(model, str(text), cycles)
        print(time.strftime("%H:%M:%S"), label, file=sys.stderr, flush=True)
        with CoordinatorLives(Path(folder) / "run") as watch:
            support.run_in(config, Path(folder), TIMEOUT_S)
    return watch.lives, sum(support.fragment_sizes(config))


def config_of(model: ModelConfig, text: str, cycles: int) -> Config:
    """Return the run: one island's batch is twice the other's."""
    tokens = cycles * FRAGMENTS * 2 * 2 * SEQUENCE
    return Config(
        run=RunConfig(
            model=model,
            data=DataConfig(paths=(text,), validation_fraction=0.02),
            outer=OuterConfig(optimizer="nesterov", learning_rate=0.4, momentum=0.6),
            sync=SyncConfig(
                steps_per_cycle=FRAGMENTS,
                fragments=FRAGMENTS,
                overlap_steps=2,
                codec_up="int8",
                codec_down="int8",
            ),
            sequence_length=SEQUENCE,
            total_tokens=tokens,
        ),
        islands={
            name: IslandConfig(batch_size=2, step_seconds=0.5) for name in ("a", "b")
        },
        placement=Placement(
            time_budget_s=60.0,
            snapshot_every_s=20.0,
            checkpoint_every_s=0.0,
            merge_buffer_bytes=BUFFER_BYTES,
            faults=(f"coordinator@{cycles * FRAGMENTS // 2}:kill",),
        ),
    ).validate()


def row(result: dict[str, Any]) -> dict[str, Any]:
    """One row of the page."""
    return {
        "life": result["life"],
        "start, over f32 parameters": f"{result['start']:.2f}",
        "live": f"{result['live']:.2f}",
        "of that its own": f"{result['own']:.2f}",
        "seconds to its service": f"{result['seconds']:.1f}",
    }


if __name__ == "__main__":
    support.script(main)
