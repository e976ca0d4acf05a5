"""Bytes on the wire by codec.

Question: what does each codec cost per parameter, headers and scales included, and
does a run train with it? Two islands of equal speed train the same model on the same
number of tokens with f32, bf16, int8, int4 and int2, the same codec up and down.

Up is counted per parameter and merged contribution, down per parameter and version
that an island adopted, up to its last report while it trained (at the end it fetches
versions that it adopts after it has last reported). Joins, which fetch everything in
f32, stand apart. Chunk headers and what gRPC puts before a message count; HTTP/2 and
TCP headers do not.

Prediction: 4.00, 2.00, 1.01, 0.56 and 0.31 bytes each way (bf16 scales of blocks of 256
and 32), a percent more for headers and partial tiles; losses within the noise of runs
whose merges differ in timing. The bound is 2 % over the formula, which is that of
`diloco plan`.

Command: `python benchmarks/codec_speed.py`, `--codecs int2` for some of them. Cost:
about 8 minutes on two cores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import support

from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    RunConfig,
    SyncConfig,
)
from diloco_jax.coordinator.settings import payload_bytes
from diloco_jax.core.families import CODECS
from diloco_jax.models.presets import PRESETS, preset
from diloco_jax.planning.plan import fragments_of

OVER_FORMULA_MAX = 1.02
"""Bytes counted over those of the formula, each way."""
LOSS_MAX = 0.8 * math.log(256)
"""Nats per byte below which a run counts as trained; guessing gives log(256)."""
ISLANDS = ("a", "b")
CYCLE_STEPS, FRAGMENTS = 12, 6
BATCH, SEQUENCE = 2, 64
TIMEOUT_S = 900.0
SAME_REPORT_S = 0.05
"""A report's records reach the tape this much later than its measures, at most."""


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--preset", default="2m", choices=PRESETS)
    parser.add_argument("--cycles", type=int, default=16)
    parser.add_argument("--step-seconds", type=float, default=0.25)
    parser.add_argument("--codecs", nargs="*", default=list(CODECS.table))
    options = parser.parse_args()
    results = {}
    for codec in options.codecs:
        config = codec_config(
            codec, options.preset, options.cycles, options.step_seconds
        )
        run = support.run_config(config, f"codec {codec}", TIMEOUT_S)
        results[codec] = measure(run, support.fragment_sizes(config))
    checks = []
    for codec, result in results.items():
        for way in ("up", "down"):
            over = result[f"bytes_{way}_per_parameter"] / result["formula"]
            what = f"{codec}: bytes {way} over the formula's"
            checks.append(support.at_most(what, over, OVER_FORMULA_MAX, ".4f"))
        checks.append(
            support.at_most(f"{codec}: eval loss", result["eval_loss"], LOSS_MAX)
        )
    return support.write_results(
        options.out,
        "codecs",
        __doc__,
        {"Runs": table(results)},
        checks,
        {"results": results},
    )


def codec_config(codec: str, model: str, cycles: int, step_seconds: float) -> Config:
    """Return two islands of equal speed for `cycles` merges per fragment."""
    tokens = cycles * CYCLE_STEPS * len(ISLANDS) * BATCH * SEQUENCE
    run = RunConfig(
        model=preset(model),
        data=DataConfig(validation_fraction=0.005),
        inner=InnerConfig(optimizer="lion", learning_rate=5e-4),
        sync=SyncConfig(
            steps_per_cycle=CYCLE_STEPS,
            fragments=FRAGMENTS,
            quorum=len(ISLANDS),
            codec_up=codec,
            codec_down=codec,
        ),
        sequence_length=SEQUENCE,
        total_tokens=tokens,
    )
    island = IslandConfig(batch_size=BATCH, step_seconds=step_seconds)
    return Config(run=run, islands=dict.fromkeys(ISLANDS, island)).validate()


def measure(run: support.Run, sizes: Sequence[int]) -> dict[str, Any]:
    """Return bytes per parameter, by way, and the figures behind them."""
    merges = [record for record in run.tape if record["kind"] == "merged"]
    parameters_up = sum(
        sizes[merge["fragment"]] * len(merge["contributions"]) for merge in merges
    )
    bytes_down, parameters_down = received(run, sizes)
    summary, parameters = run.summary, sum(sizes)
    expected = payload_bytes(run.config.run.sync.codec_up, fragments_of(run.config))
    return {
        "formula": sum(expected) / parameters,
        "bytes_up_per_parameter": summary["bytes_up"] / parameters_up,
        "bytes_down_per_parameter": bytes_down / parameters_down,
        "bytes_join_per_parameter": summary["bytes_join"] / parameters / len(ISLANDS),
        "bytes_up": summary["bytes_up"],
        "bytes_down": summary["bytes_down"],
        "bytes_join": summary["bytes_join"],
        "parameters": parameters,
        "merges": len(merges),
        "contributions": sum(len(merge["contributions"]) for merge in merges),
        "refused": sum(record["kind"] == "refused" for record in run.tape),
        "full_model_contributions": parameters_up / parameters,
        "full_model_adoptions": parameters_down / parameters,
        "eval_loss": summary["eval_loss"],
        "tokens_merged": summary["tokens_merged"],
    }


def received(run: support.Run, sizes: Sequence[int]) -> tuple[int, int]:
    """Return the bytes fetched by all islands, and the parameters of the versions
    adopted, both up to each island's last report in training."""
    last = {
        line["island"]: line
        for line in run.metrics
        if line["kind"] == "island" and line["phase"] == "training"
    }
    newest: dict[tuple[str, int], int] = {}
    for record in run.tape:
        if record["kind"] != "island" or record["record"]["kind"] != "adopted":
            continue
        name, adopted = record["island"], record["record"]
        if record["time"] <= last[name]["time"] + SAME_REPORT_S:
            newest[name, adopted["fragment"]] = adopted["version"][1]
    # Islands join before the first merge, at version 0.
    parameters = sum(sizes[f] * version for (_, f), version in newest.items())
    return sum(line["bytes_down"] for line in last.values()), parameters


def table(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per codec."""
    plain = next(iter(results.values()))["eval_loss"]
    return [
        {
            "codec": codec,
            "up, bytes": f"{result['bytes_up_per_parameter']:.4f}",
            "down, bytes": f"{result['bytes_down_per_parameter']:.4f}",
            "join, bytes": f"{result['bytes_join_per_parameter']:.4f}",
            "contributions": result["contributions"],
            "refused": result["refused"],
            "models sent up": f"{result['full_model_contributions']:.1f}",
            "models adopted": f"{result['full_model_adoptions']:.1f}",
            "eval loss": f"{result['eval_loss']:.4f}",
            "against the first": f"{result['eval_loss'] / plain - 1:+.2%}",
        }
        for codec, result in results.items()
    ]


if __name__ == "__main__":
    support.script(main)
