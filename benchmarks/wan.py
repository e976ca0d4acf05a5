"""Ordinary links: decoupled islands, data-parallel and synchronous DiLoCo on the same.

Question: 12 B parameters, islands whose links carry 2 or 5 Gbit/s, steps of 1 s (as
planned) or of 6 s. How many times the steps of data-parallel training does the
decoupled run make, and does it notice the links at all?

Each island and the coordinator live in a network namespace of their own, behind links
whose rate is scaled: the bytes of the small model over the rate, relative to the step,
are those of 12 B parameters. H, P and tau are those of configs/four_regions.py, with
deltas in int4 and publishes in int8; TLS is on. A step is emulated (`step_seconds`), so
that two cores carry all islands. Data-parallel and synchronous DiLoCo are a step of the
same length and a ring that sums a vector of the model's size over the same links: bf16
after each step, or f32 after each H; their formulas stand beside. The loss at equal
tokens is that of the decoupled run, and of plain training with all islands' batches in
one.

Prediction: what arithmetic gives for data-parallel, and 7 % more for the headers of
TCP; 0.99 of no limit for the decoupled run, also at 2 Gbit/s and 1 s, where its
exchange takes about half of the link.

Seen: three rings at steps of 6 s took 0.165 to 0.296 more than their formulas, beside
other work on the machine (load 11). Rings alone, the day after on an AMD EPYC (load 2;
`rings_alone` of the raw numbers): 0.106 and 0.135 for two islands at 5 Gbit/s and 6 s,
0.089 and 0.113 for four, 0.106 for two at 2 Gbit/s, and 0.255 for four. It is TCP's: a
link that holds 50 ms drops what a window has too much, so that 7 % of the segments and
more go twice, and where a window has few segments a timeout comes, of 0.2 s and more
each: 85 of them in the last case, 0 to 26 in the others. Links that hold 0.5 s, tried
for two islands at 5 Gbit/s and 6 s, lost nothing and took 0.235 more; perhaps since
acknowledgements wait behind what the other direction sends.

Command: `python -m benchmarks.wan`, as root. Cost: about 35 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import support
from links import HUB_ADDRESS, Links, NoLinksError, links
from pinned import pinned_run
from ring import member

from diloco_jax import baseline, evaluation
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    ModelConfig,
    Placement,
    RunConfig,
    loading,
)
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.workdir import read_config

ROOT = Path(__file__).resolve().parents[1]
MODEL = ModelConfig(
    d_model=192, num_layers=4, num_heads=3, num_kv_heads=1, head_dim=64, mlp_dim=512
)
SEQUENCE = 32
STEP_S = 0.5
NO_LIMIT_SHARE_MIN = 0.97
DATA_PARALLEL_MIN = 20.0
FORMULA_ERROR_MAX = 0.15
"""Headers and acknowledgements take 7 % of a link, which the formulas leave out."""
ROUNDS = 2
"""Steps of data-parallel training; each takes as long as the one before."""
TIMEOUT_S = 900.0


@dataclasses.dataclass(frozen=True)
class Link:
    """A link of the full size, and the step of the islands behind it."""

    gbit_per_s: float
    step_s: float

    @property
    def text(self) -> str:
        """Text for tables."""
        return f"{self.gbit_per_s:g} Gbit/s, {self.step_s:g} s"


LINKS: tuple[Link, ...] = (Link(5, 1), Link(2, 1), Link(5, 6), Link(2, 6))


def main() -> int:
    """Run it; return 1 if a bound is broken, 2 where namespaces cannot be made."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--islands", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--cycles", type=int, default=2)
    parser.add_argument(
        "--ring",
        nargs="+",
        metavar="N",
        help="rank, parameters and addresses: a member",
    )
    options = parser.parse_args()
    if options.ring:
        rank, parameters, *addresses = options.ring
        found = member(int(rank), int(parameters), addresses, STEP_S, ROUNDS)
        print(json.dumps(found))
        return 0
    counts, cycles, chosen = options.islands, options.cycles, LINKS
    if options.quick:
        counts, cycles, chosen = [2], 0, (Link(5, 6),)
    rows: list[dict[str, Any]] = []
    try:
        for count in counts:
            rows += measured(count, cycles, chosen)
    except NoLinksError as error:
        print(error, file=sys.stderr)
        return 2
    tables = {
        "Steps": [format_row(row) for row in rows],
        "Loss at equal tokens": [format_loss(row) for row in rows],
    }
    raw = {"rows": rows}
    return support.deliver(options, "wan", __doc__, tables, bounds(rows), raw)


def measured(count: int, cycles: int, chosen: tuple[Link, ...]) -> list[dict[str, Any]]:
    """Measure one number of islands; return a row per link, the one without a limit
    first."""
    config = config_of(count, cycles)
    parameters = sum(support.fragment_sizes(config))
    full = sum(support.fragment_sizes(reference()))
    names = list(config.islands)
    plain = baseline.run(config)
    with links(names) as made:
        free = decoupled(config, made, "no limit")
        rows = [{"islands": count, "link": "no limit", "plain": plain, **free}]
        for link in chosen:
            scale = parameters / full * link.step_s / STEP_S
            rate = link.gbit_per_s * 1e9 * scale
            made.limit(rate)
            ring = all_reduces(made, names, parameters)
            run = decoupled(config, made, link.text)
            # Each member sends so much of the vector.
            sent = 2 * (count - 1) / count * parameters
            outer = config.run.sync.cycle
            rows.append(
                {
                    "islands": count,
                    "link": link.text,
                    "bits_per_s": rate,
                    "parallel_s": statistics.median(ring["bf16"]),
                    "parallel_formula_s": STEP_S + 16 * sent / rate,
                    "synchronous_s": STEP_S + ring["f32"][0] / outer,
                    "synchronous_formula_s": STEP_S + 32 * sent / rate / outer,
                    "free_s": free["step_s"],
                    "plain": plain,
                    **run,
                }
            )
    return rows


def reference() -> Config:
    """Return the config of the full size, with the codecs of this measurement."""
    config = loading.read_config(ROOT / "configs" / "four_regions.py")
    sync = dataclasses.replace(config.run.sync, codec_up="int4", codec_down="int8")
    return config.replace("sync", sync)


def config_of(count: int, cycles: int) -> Config:
    """Return a run of so many cycles; 0: of a sixth of one."""
    sync = reference().run.sync
    steps = cycles * sync.cycle or sync.cycle // 6
    island = IslandConfig(batch_size=1, step_seconds=STEP_S)
    return Config(
        run=RunConfig(
            model=MODEL,
            data=DataConfig(validation_fraction=0.005),
            sync=dataclasses.replace(sync, quorum=count),
            sequence_length=SEQUENCE,
            total_tokens=count * steps * SEQUENCE,
        ),
        islands={f"region-{place}": island for place in range(count)},
        placement=Placement(
            bind=f"{HUB_ADDRESS}:0", evaluate_every_steps=0, time_budget_s=120.0
        ),
    )


def decoupled(config: Config, made: Links, label: str) -> dict[str, Any]:
    """Train; return seconds of a step, all pauses included, share of the tokens that
    were merged, bytes of a link and the loss."""
    print(f"{len(config.islands)} islands, {label}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="diloco-wan-") as name:
        folder = Path(name)
        make_certificates(folder / "certs", [HUB_ADDRESS], 1, islands=config.islands)
        secured = dataclasses.replace(
            config.placement, certificates=str(folder / "certs")
        )
        config = dataclasses.replace(config, placement=secured)
        with pinned_run(config, folder, within=made.within) as run:
            for island in config.islands:
                run.island(island)
            summary = run.finish(TIMEOUT_S).summary
            found = evaluation.run(read_config(run.workdir), run.workdir)
    islands = list(summary["islands"].values())
    seconds = [one["step_seconds"] + one["stalled_seconds"] for one in islands]

    def most(name: str) -> float:
        both = zip(islands, seconds, strict=True)
        return max(float(8 * one[name] / lasted) for one, lasted in both)

    return {
        "step_s": statistics.mean(
            lasted / one["steps"] for one, lasted in zip(islands, seconds, strict=True)
        ),
        "longest_gap_s": max(one["max_step_gap_seconds"] for one in islands),
        "merged": summary["tokens_merged"] / summary["tokens_computed"],
        "up_bits_per_s": most("bytes_up"),
        "down_bits_per_s": most("bytes_down"),
        "loss": found["eval_loss"],
    }


def all_reduces(
    made: Links, names: list[str], parameters: int
) -> dict[str, list[float]]:
    """Let a ring of all islands sum vectors; return the slowest member's seconds."""
    ring = [sys.executable, "-m", "benchmarks.wan", "--ring"]
    addresses = [made.address(name) for name in names]
    members = []
    for rank, name in enumerate(names):
        command = [*made.within(name), *ring, str(rank), str(parameters), *addresses]
        members.append(subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT))
    try:
        told = [member.communicate(timeout=TIMEOUT_S)[0] for member in members]
    finally:
        for member in members:
            member.kill()
            member.wait()
    if any(member.returncode for member in members):
        raise support.RunError("a member of the ring failed")
    found = [json.loads(text) for text in told]
    return {
        kind: [
            max(seconds) for seconds in zip(*(one[kind] for one in found), strict=True)
        ]
        for kind in found[0]
    }


def bounds(rows: list[dict[str, Any]]) -> list[support.Check]:
    """The bounds of this benchmark against what was measured."""
    checks = []
    for row in rows:
        if "bits_per_s" not in row:
            continue
        what = f"{row['islands']} islands, {row['link']}"
        share = row["free_s"] / row["step_s"]
        checks.append(
            support.at_least(f"{what}: steps over no limit", share, NO_LIMIT_SHARE_MIN)
        )
        times = row["parallel_s"] / row["step_s"]
        allowed = row["parallel_formula_s"] / STEP_S
        bound = min(DATA_PARALLEL_MIN, NO_LIMIT_SHARE_MIN * allowed)
        checks.append(
            support.at_least(f"{what}: times data-parallel", times, bound, ".1f")
        )
        error = abs(row["parallel_s"] / row["parallel_formula_s"] - 1)
        checks.append(
            support.at_most(f"{what}: ring and formula", error, FORMULA_ERROR_MAX)
        )
    return support.each("islands behind a link", checks)


def format_row(row: dict[str, Any]) -> dict[str, str]:
    """One line of the table of steps."""
    told = {"islands": str(row["islands"]), "link, step": row["link"]}
    kbit = f"{row['up_bits_per_s'] / 1e3:.0f} / {row['down_bits_per_s'] / 1e3:.0f}"
    limited = "bits_per_s" in row

    def against(kind: str) -> str:
        if not limited:
            return ""
        measured, formula = row[f"{kind}_s"], row[f"{kind}_formula_s"]
        times = measured / row["step_s"]
        return f"{measured:.2f} s ({formula:.2f}), {times:.1f} x"

    return told | {
        "kbit/s": f"{row['bits_per_s'] / 1e3:.0f}" if limited else "",
        "used up / down": kbit,
        "decoupled step": f"{row['step_s']:.3f} s",
        "of no limit": f"{row['free_s'] / row['step_s']:.3f}" if limited else "",
        "longest gap": f"{row['longest_gap_s']:.2f} s",
        "data-parallel (formula)": against("parallel"),
        "synchronous DiLoCo": against("synchronous"),
        "merged": f"{row['merged']:.3f}",
    }


def format_loss(row: dict[str, Any]) -> dict[str, str]:
    """One line of the table of losses."""
    plain = row["plain"]["eval_loss"]
    return {
        "islands": str(row["islands"]),
        "link, step": row["link"],
        "decoupled": f"{row['loss']:.4f}",
        "plain": f"{plain:.4f}",
        "difference": f"{100 * (row['loss'] / plain - 1):+.2f} %",
    }


if __name__ == "__main__":
    support.script(main)
