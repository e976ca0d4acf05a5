"""A real fine-tune: SmolLM2-135M on Python, by unequal islands, one of them killed.

Question: two islands, one with twice the batch of the other, train
SmolLM2-135M-Instruct on 100,000 tokens of the Python standard library's sources, and
the small one is killed with SIGKILL on the way. How well does the model then predict
files that it never saw, and how well if one plain loop of JAX and optax had trained on
the same rows? The same with adapters of rank 16 in place of all weights (LoRA).

The islands and the coordinator are processes that speak gRPC, each island on one core.
The twin has both cores, and the batch of both islands together. Bits per byte are those
of the first tokens of files whose names a hash holds out; standard errors are over the
files, and that of a fall is of the differences file by file. The twin's seconds have
neither its start nor its compilation.

![Held-out bits per byte](../../figures/finetune.svg)

There is one run of each part, so nothing here tells how far another run of it would be
from this one: the upper ends below are those over the held-out files.

Four parts, each run alone, join into one page. Command, with the folder of
`benchmarks/smollm2.py`: `export SMOLLM2=FOLDER`, then `python benchmarks/finetune.py`
with nothing, `--twin`, `--lora`, `--lora --twin`; `--again` writes the page from raw
results. Cost: about 15 minutes each on two cores, 14 GiB of memory and 8 GiB of disk.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import finetune_twin
import jax
import numpy as np
import support
from finetune_page import add_part, write_again
from finetune_text import HeldOut, prepare
from machine import Pinned, device, provenance

from diloco_jax import evaluation
from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    ModelConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator.holding import fragment_snapshots
from diloco_jax.data.loading import load_data
from diloco_jax.models.build import build
from diloco_jax.models.model import Params
from diloco_jax.weights import adapted
from diloco_jax.weights.first import first_params, started_from
from diloco_jax.workdir import read_config

SEQUENCE = 256
BATCHES = {"large": 4, "small": 2}
KILLED = "small"
RANK = 16
RATES = {"run": 5e-5, "twin": 5e-5, "lora": 1e-3, "lora twin": 1e-3}
"""Peak learning rates by part."""
LOOKS = 4
"""Points of a curve, besides the start."""
LIMIT_S = 1800.0
PROMPTS = (
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(",
    "def read_lines(path):\n    with open(path, encoding=",
)
NEW_TOKENS = 96


def main() -> int:
    """Run one part and write the page; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--weights", default=os.environ.get("SMOLLM2", ""))
    parser.add_argument("--lora", action="store_true", help="train adapters")
    parser.add_argument("--twin", action="store_true", help="the plain loop")
    parser.add_argument("--quick", action="store_true", help="a trial of 6,144 tokens")
    parser.add_argument("--tokens", type=int, default=0, help="of the run")
    parser.add_argument("--rate", type=float, default=0.0, help="peak learning rate")
    parser.add_argument("--keep", type=Path, help="new folder for the run and exports")
    parser.add_argument("--again", action="store_true", help="from raw results")
    options = parser.parse_args()
    if options.again:
        return write_again(options.out, __doc__)
    if not Path(options.weights, "config.json").is_file():
        parser.error(f"--weights {options.weights!r} or $SMOLLM2 must be a folder")
    part = " ".join(["lora"] * options.lora + ["twin"] * options.twin) or "run"
    jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]
    options.rate = options.rate or RATES[part]
    options.tokens = options.tokens or (6_144 if options.quick else 99_840)
    with tempfile.TemporaryDirectory(prefix="diloco-finetune-") as scratch:
        work = options.keep or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        weights = Path(options.weights).resolve()
        config = fine_tune(weights, prepare(work, weights, SEQUENCE), options)
        text = load_data(config.run).digest
        held_out = HeldOut.read(weights, 8 if options.quick else 64, SEQUENCE)
        measure = measure_twin if options.twin else measure_run
        found = measure(config, held_out, work, options)
    found |= {"quick": options.quick, "text": text}
    found |= device() | provenance(without_folders(config))
    return add_part(options.out, __doc__, part, found)


def fine_tune(weights: Path, rows: Path, options: Any) -> Config:
    """Return the config of the run, which its twin follows, too."""
    every, strike = (4, 2) if options.quick else (12, 40)
    run = RunConfig(
        model=ModelConfig(lora_rank=RANK if options.lora else 0),
        data=DataConfig(paths=(str(rows),)),
        inner=InnerConfig(learning_rate=options.rate, weight_decay=0.0, rewarm_steps=4),
        sync=SyncConfig(steps_per_cycle=every, fragments=every),
        sequence_length=SEQUENCE,
        total_tokens=options.tokens,
    )
    islands = {
        name: IslandConfig(batch_size=rows, accumulation=rows // 2)
        for name, rows in BATCHES.items()
    }
    placement = Placement(
        faults=(f"{KILLED}@{strike}:kill",),
        time_budget_s=30.0,
        checkpoint_every_s=0.0,
        export_every=1 if options.quick else 2,
        exports_kept=LOOKS,
    )
    config = Config(run=run, islands=islands, placement=placement)
    return started_from(config, f"hf:{weights}").validate()


def without_folders(config: Config) -> Config:
    """Return the config without the folders of this machine, which say nothing."""
    model = dataclasses.replace(config.run.model, weights="")
    run = dataclasses.replace(config.run, model=model, data=DataConfig())
    return dataclasses.replace(config, run=run)


def measure_run(
    config: Config, held_out: HeldOut, work: Path, options: Any
) -> dict[str, Any]:
    """Run it as processes; return what it took and how the merged model does."""
    cores = dict(zip(BATCHES, sorted(os.sched_getaffinity(0)), strict=False))
    with Pinned(work / "run", cores) as use:
        run = support.run_in(config, work, LIMIT_S)
    run_config = read_config(run.workdir).run
    model = adapted.base_run(run_config).model

    def bits(cycle: int | None = None) -> np.ndarray:
        params = evaluation.load_params(run.workdir, cycle)
        return held_out.bits(model, whole(run_config, params))

    curve = [point(held_out, 0, first := first_bits(run_config, held_out))]
    for cycle in fragment_snapshots.cycle_numbers(run.workdir / "exports"):
        tokens = evaluation.kept_facts(run.workdir, cycle)["tokens"]
        curve.append(point(held_out, tokens, bits(cycle)))
    curve.append(point(held_out, run.summary["tokens_merged"], last := bits()))
    texts = [said(Path(config.run.model.weights[3:]))]
    merged = ("--merged",) if options.lora else ()
    for name, more in (("export", merged), *((("adapter", ()),) if merged else ())):
        command = (*support.DILOCO, "export", str(run.workdir), str(work / name))
        subprocess.run([*command, *more], check=True)
    texts.append(said(work / "export"))
    return {
        "seconds": run.summary["wall_seconds"],
        "curve": curve,
        "fall": held_out.per_byte(first - last),
        "rate": options.rate,
        "tokens": run.summary["tokens_merged"],
        "memory": use.own,
        "disk": use.disk,
        "summary": run.summary,
        "bits": [first.tolist(), last.tolist()],
        "text_bytes": held_out.text_bytes.tolist(),
        "texts": texts,
    }


def measure_twin(
    config: Config, held_out: HeldOut, work: Path, options: Any
) -> dict[str, Any]:
    """Train in one plain loop; return what it took and how the model does."""
    config = resolve(config)
    model = adapted.base_run(config.run).model
    found = [first := first_bits(config.run, held_out)]
    curve = [point(held_out, 0, first)]

    def look(tokens: int, params: Params) -> None:
        found.append(held_out.bits(model, whole(config.run, params)))
        curve.append(point(held_out, tokens, found[-1]))

    batch = sum(BATCHES.values())
    trained = finetune_twin.train(config, batch, options.rate, LOOKS, look)
    return {
        **trained,
        "curve": curve,
        "fall": held_out.per_byte(first - found[-1]),
        "rate": options.rate,
        "bits": [first.tolist(), found[-1].tolist()],
        "text_bytes": held_out.text_bytes.tolist(),
    }


def whole(run: RunConfig, params: Params) -> Params:
    """Return all weights of what a run trains, adapters added."""
    return adapted.merged(run, params) if run.model.lora_rank else params


def first_bits(run: RunConfig, held_out: HeldOut) -> np.ndarray:
    """Return the bits that the weights need before any training, f64 [N]."""
    plain = adapted.base_run(run)
    return held_out.bits(plain.model, first_params(plain, build(plain)))


def point(held_out: HeldOut, tokens: float, bits: np.ndarray) -> dict[str, float]:
    """Return a point of a curve."""
    value, error = held_out.per_byte(bits)
    print(f"{tokens:.0f} tokens: {value:.4f} +- {error:.4f} bits a byte", flush=True)
    return {"tokens": tokens, "bits_per_byte": value, "error": error}


def said(folder: Path) -> list[dict[str, Any]]:
    """Return greedy continuations, and the share of their lines that Python parses."""
    found = []
    for prompt in PROMPTS:
        command = [*support.DILOCO, "generate", str(folder), "--prompt", prompt]
        command += ["--max-tokens", str(NEW_TOKENS), "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        text = prompt + json.loads(done.stdout)["text"]
        found.append({"prompt": prompt, "text": text, "parsed": parsed(text)})
    return found


def parsed(text: str) -> float:
    """Return the share of a text's lines that are the longest beginning which is valid
    Python; its last line, which the end of the sampling cuts, does not count."""
    lines = text.splitlines()[:-1]
    for count in range(len(lines), 0, -1):
        try:
            ast.parse("\n".join(lines[:count]))
        except (SyntaxError, ValueError):
            continue
        return count / len(lines)
    return 0.0


if __name__ == "__main__":
    support.script(main)
