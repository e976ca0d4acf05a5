"""Lying islands: their harm to the loss, and the cost of guarding against them.

Two of eight islands lie in every delta that they send. Each run is an emulation with
0.04 M parameters, 12 fragments and 300 thousand tokens; deltas go up as f32, so that a
lie is exact. Losses are compared with those of the six honest islands alone, under the
default rule, on as many tokens and with the same seeds: mean in per cent, lowest and
highest. "Bounds" are those of `sync.delta_bound` and `sync.quarantine_after`, on by
default.

Bounds alone are enough against deltas that are long or not finite. What lies within
them needs the trimmed mean, which costs nothing here when nobody lies: eight islands
without a lie are behind six under every rule, since each makes fewer steps. Means are
over two seeds; a single seed is up to 2.7 % behind with it. The bound on lengths does
not see a flipped delta or a random one, and nobody is quarantined for it.

- *times k*: k times the delta. *flipped*: its negative. *random*: noise of the same
  length in each fragment. *NaN*: no number in it is finite.
- The last table has the longest honest delta of all runs, as a multiple of what is
  usual among the others: `sync.delta_bound` must be above it.

Command: `python benchmarks/liars.py`. Cost: about 15 minutes on two cores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import support
from quality_configs import SIZES, config, equal, network, unequal

from diloco_jax.config import SyncConfig
from diloco_jax.core.fragment_merge import is_fit, length
from diloco_jax.files import write_json
from diloco_jax.protocol.coordinator import takes
from diloco_jax.protocol.messages import DeltaKey
from diloco_jax.simulation import bodies
from diloco_jax.simulation.coordinator import Received
from diloco_jax.simulation.emulate import emulate

ISLANDS, LIARS, TOKENS = 8, 2, 300_000
SIZE = dataclasses.replace(SIZES["0.04m"], tokens=TOKENS)
SEEDS = 2
RULES = ("rda", "mean", "clipped_mean", "trimmed_mean")
HONEST = "nobody lies"
_LONG = ("times 4", "times 10", "times 100", "flipped", "flipped, times 3")
LIES = (HONEST, *_LONG, "random", "NaN")
OPEN = ("times 4", "times 10", "times 100")
"""Lies that are shown without bounds too."""
ALONE = "the six alone"
NEAR = 0.02
"""Share of the loss by which two liars may make the trimmed mean with bounds worse."""
TROUBLES: dict[str, dict[str, Any]] = {
    "8 equal islands": {},
    "8 unequal islands": {"islands": unequal()},
    "one island down half the time": {"away": True},
    "unlike shards": {"unlike_shards": True},
}


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--runs", type=Path, help="finished runs, kept for the next call"
    )
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    done: dict[str, Any] = {}
    if options.runs and options.runs.exists():
        done = json.loads(options.runs.read_text())
    for seed in range(options.seeds):
        for case in cases():
            if (key := f"{case}, seed {seed}") not in done:
                done[key] = run(case, seed)
                print(key, done[key]["loss"], file=sys.stderr)
                if options.runs:
                    write_json(done, options.runs)
    found = Found(done, options.seeds)
    return support.write_results(
        options.out,
        "liars",
        __doc__,
        {
            "The loss, over that of the six honest islands": found.losses(),
            "Honest deltas": found.honest(),
        },
        found.checks(),
        {"runs": done},
    )


def cases() -> Iterator[str]:
    """Yield the names of all runs of one seed: RULE, BOUNDS, LIE, or a trouble."""
    yield ALONE
    for rule in RULES:
        for lie in LIES:
            yield f"{rule}, bounds, {lie}"
    for lie in OPEN:
        yield f"rda, no bounds, {lie}"
    yield from TROUBLES


def run(case: str, seed: int) -> dict[str, Any]:
    """Return the loss of one emulation, what was refused, and how long honest deltas
    were."""
    islands = equal(ISLANDS, SIZE.sequences)
    rule, guarded, lie = "rda", True, HONEST
    trouble = dict(TROUBLES.get(case, {}))
    away = trouble.pop("away", False)
    if case == ALONE:
        islands = dict(list(islands.items())[LIARS:])
    elif case in TROUBLES:
        islands = trouble.pop("islands", islands)
    else:
        rule, bound, lie = case.split(", ", 2)
        guarded = bound == "bounds"
    settings: dict[str, Any] = {"merge": rule, "codec_up": "f32"}
    if not guarded:
        settings |= {"delta_bound": 0.0, "quarantine_after": 0}
    chosen = config(SIZE, islands=islands, **settings)
    placement = chosen.placement
    if away:
        kills = tuple(f"i0#{n}@12:kill" for n in range(1, 50))
        placement = dataclasses.replace(placement, faults=kills)
        trouble["down_seconds"] = 12.0
    chosen = dataclasses.replace(
        chosen,
        run=dataclasses.replace(chosen.run, seed=seed),
        placement=placement,
    )
    ratios: list[float] = []
    with lying(lie, seed), measured(ratios, honest=lie == HONEST):
        summary = emulate(chosen, options=network(2, **trouble)).summary
    return {
        "loss": summary["eval_loss"],
        "lost": {n: i["tokens_lost"] for n, i in summary["islands"].items()},
        "longest": max(ratios, default=math.nan) if lie == HONEST else None,
        "judged": len(ratios),
    }


@contextlib.contextmanager
def lying(lie: str, seed: int) -> Iterator[None]:
    """Let the first islands lie in what they send."""
    rng, honest = np.random.default_rng(seed), bodies.StoreMerging.receive

    def receive(merging: Any, key: DeltaKey, encoded: Any) -> Received:
        if lie == HONEST or int(key.island[1:]) >= LIARS:
            return honest(merging, key, encoded)
        values = np.frombuffer(encoded.layout.pack(encoded.pieces), np.float32)
        payload = lied(values, lie, rng).view(np.uint8)
        squares = merging.store.squares(key.fragment, payload)
        if not is_fit(squares):
            return Received((payload, squares), "non_finite")
        return Received((payload, squares), norm=length(squares))

    with mock.patch.object(bodies.StoreMerging, "receive", receive):
        yield


def lied(values: np.ndarray, lie: str, rng: np.random.Generator) -> np.ndarray:
    """Return what a liar sends in the place of its delta, f32[elements]."""
    if lie == "NaN":
        return np.full_like(values, np.nan)
    if lie == "random":
        noise = rng.standard_normal(values.size).astype(np.float32)
        return noise * np.float32(np.linalg.norm(values) / np.linalg.norm(noise))
    times = float(lie.split("times ")[1]) if "times" in lie else 1.0
    return values * np.float32(-times if lie.startswith("flipped") else times)


@contextlib.contextmanager
def measured(ratios: list[float], *, honest: bool) -> Iterator[None]:
    """Collect the lengths of the deltas that are judged, over what is usual."""
    original = takes.Usual.most

    def most(usual: Any, name: str, delta: Any) -> float:
        found = original(usual, name, delta)
        if honest and delta.norm and math.isfinite(found):
            ratios.append(delta.norm / found * SyncConfig().delta_bound)
        return found

    with mock.patch.object(takes.Usual, "most", most):
        yield


@dataclasses.dataclass(frozen=True, kw_only=False)
class Found:
    """All runs, by name and seed."""

    runs: dict[str, Any]
    seeds: int

    def over(self, case: str) -> list[float]:
        """Return by how much the losses are above those of the six, as shares."""
        return [
            self._of(case, seed)["loss"] / self._of(ALONE, seed)["loss"] - 1
            for seed in range(self.seeds)
        ]

    def losses(self) -> Iterator[dict[str, str]]:
        """Yield the rows of the table of losses, by rule."""
        for rule in RULES:
            yield {"rule": f"`{rule}`", "bounds": "yes", **self._row(rule, "bounds")}
        yield {"rule": "`rda`", "bounds": "no", **self._row("rda", "no bounds")}

    def honest(self) -> Iterator[dict[str, str]]:
        """Yield the rows of the table of honest deltas."""
        for case in TROUBLES:
            runs = [self._of(case, seed) for seed in range(self.seeds)]
            lost = [r["lost"] for r in runs]
            refused = sum("out_of_bounds" in i for o in lost for i in o.values())
            yield {
                "run": case,
                "deltas judged": f"{sum(r['judged'] for r in runs):,}",
                "longest, over the usual": f"{max(r['longest'] for r in runs):.2f}",
                "islands with a refused delta": str(refused),
            }

    def checks(self) -> list[support.Check]:
        """Return the bounds on the trimmed mean, and on honest runs."""
        near = [
            support.at_most(
                f"trimmed mean with bounds, {lie}: loss over the six's, %",
                100 * statistics.mean(self.over(f"trimmed_mean, bounds, {lie}")),
                100 * NEAR,
                "+.2f",
            )
            for lie in LIES
        ]
        refused = [
            row["run"]
            for row in self.honest()
            if row["islands with a refused delta"] != "0"
        ]
        return [*near, support.none_of("honest runs with a refused delta", refused)]

    def _of(self, case: str, seed: int) -> dict[str, Any]:
        found: dict[str, Any] = self.runs[f"{case}, seed {seed}"]
        return found

    def _row(self, rule: str, bound: str) -> dict[str, str]:
        cells = {}
        for lie in LIES:
            case = f"{rule}, {bound}, {lie}"
            if f"{case}, seed 0" in self.runs:
                values = [100 * value for value in self.over(case)]
                low, high = min(values), max(values)
                mean = statistics.mean(values)
                cells[lie] = f"{mean:+.1f} ({low:+.1f}, {high:+.1f})"
            else:
                cells[lie] = ""
        return cells


if __name__ == "__main__":
    sys.exit(main())
