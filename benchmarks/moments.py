"""Which moments of the inner optimizer should an island begin with that comes back?

Question: eight islands fail every 100 steps on average and come back. Each begins at
the newest anchors. Its moments (AdamW) may be fresh, with a learning rate that rises
again (`inner.rewarm_steps`) or at once in full, its own from when it failed or from a
checkpoint up to 50 steps before, or those of another island of the same layout, as they
are now. What does each do to the loss at equal tokens?

Emulations of 0.1 M parameters and 2 M tokens, failures at the same moments for all,
five seeds. *Against the best* is the mean difference of validation losses of the same
seed, with its standard error.

Prediction: another island's and one's own are equal, since moments average over
thousands of steps of like data; fresh ones cost 0.5 %, a little less with a rising
rate.

Command: `python -m benchmarks.moments`. Cost: about 15 minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import support
from quality_configs import SIZES, config, network

from diloco_jax.config import Config
from diloco_jax.simulation import emulate as emulation
from diloco_jax.simulation.bodies import TrainedBody
from diloco_jax.simulation.island import VirtualFetch

SIZE = "0.1m"
SEEDS = 5
FAIL_EVERY_S, DOWN_S, JOIN_S = 100.0, 8.0, 4.0
SAVE_EVERY = 50
STEADY = "no failures"
FRESH, FRESH_FULL = "fresh, the rate rises again", "fresh, at the full rate"
OWN, SAVED, PEER = "its own", "its own, up to 50 steps old", "another island's"
KINDS = (STEADY, FRESH, FRESH_FULL, OWN, SAVED, PEER)
PEER_MAX = 0.002
"""Largest relative loss by which another island's moments may be worse than one's own.
"""


class Moments:
    """Moments of all islands of one emulation, by how they are kept."""

    def __init__(self, kind: str, every: int) -> None:
        self.kind, self.every = kind, every
        self.bodies: dict[str, KeepingBody] = {}
        """The newest incarnation of each island."""
        self.saved: dict[str, Any] = {}
        self.restarts = 0

    def for_return(self, name: str) -> Any:
        """Return the moments that an island comes back with; None for fresh ones."""
        before = self.bodies.get(name)
        if before is None:
            return None
        self.restarts += 1
        if self.kind == OWN:
            return before.moments()
        if self.kind == SAVED:
            return self.saved.get(name)
        if self.kind == PEER:
            others = [body for other, body in self.bodies.items() if other != name]
            return max(others, key=lambda body: body.steps).moments()
        return None


class KeepingBody(TrainedBody):
    """A body that may begin with moments of before; `name`, `kept` are set after it is
    made."""

    name: str
    kept: Moments
    steps = 0

    def begin(self, fetched: Mapping[int, VirtualFetch]) -> None:
        """Join, then take over moments."""
        super().begin(fetched)
        moments = self.kept.for_return(self.name)
        if moments is not None:
            self._replica._moments = jax.tree.map(jnp.copy, moments)
        self.kept.bodies[self.name] = self

    def train(self, positions: Any, learning_rate: float) -> None:
        """Make a step, and save now and then."""
        super().train(positions, learning_rate)
        self.steps += 1
        if self.steps % self.kept.every == 0:
            self.kept.saved[self.name] = self.moments()

    def moments(self) -> Any:
        """Return a copy of the moments as they are."""
        return jax.tree.map(jnp.copy, self._replica._moments)


@contextmanager
def keeping(kind: str, every: int = SAVE_EVERY) -> Iterator[Moments]:
    """Let emulations in the block keep moments so. every: steps between checkpoints."""
    kept, make = Moments(kind, every), emulation._Emulator._make_body

    def make_body(self: Any, name: str) -> TrainedBody:
        body = make(self, name)
        body.__class__ = KeepingBody
        body.name, body.kept = name, kept  # type: ignore[attr-defined]
        return body

    emulation._Emulator._make_body = make_body  # type: ignore[method-assign]
    try:
        yield kept
    finally:
        emulation._Emulator._make_body = make  # type: ignore[method-assign]


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    options = parser.parse_args()
    size = SIZES[SIZE]
    if options.quick:
        options.seeds = 1
        size = dataclasses.replace(SIZES["0.04m"], tokens=100_000)
    losses: dict[str, list[float]] = {kind: [] for kind in KINDS}
    restarts: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for seed in range(options.seeds):
        for kind in KINDS:
            print(time.strftime("%H:%M:%S"), seed, kind, file=sys.stderr, flush=True)
            with keeping(kind) as kept:
                loss = emulated(config(size), kind, seed)
            losses[kind].append(loss)
            restarts[kind].append(kept.restarts)
    best = min(KINDS[1:], key=lambda kind: statistics.mean(losses[kind]))
    rows = [
        {
            "moments": kind,
            "loss": support.spread(losses[kind], ".4f"),
            "against no failures": difference(losses[kind], losses[STEADY]),
            "against the best": difference(losses[kind], losses[best]),
            "returns": f"{statistics.mean(restarts[kind]):.0f}",
        }
        for kind in KINDS
    ]
    worse = relative(losses[PEER], losses[OWN])
    checks = [
        support.at_most(
            "another island's against its own", statistics.mean(worse), PEER_MAX, "+.4f"
        )
    ]
    raw = {"losses": losses, "restarts": restarts}
    return support.deliver(options, "moments", __doc__, {"Losses": rows}, checks, raw)


def emulated(of: Config, kind: str, seed: int) -> float:
    """Return the validation loss of one emulation."""
    run = dataclasses.replace(of.run, seed=seed)
    if kind not in (STEADY, FRESH):
        inner = dataclasses.replace(run.inner, rewarm_steps=0)
        run = dataclasses.replace(run, inner=inner)
    failing: dict[str, Any] = {
        "failure_every_seconds": FAIL_EVERY_S,
        "down_seconds": DOWN_S,
        "join_seconds": JOIN_S,
        "chance_seed": seed,
    }
    options = network(2, **({} if kind == STEADY else failing))
    found = emulation.emulate(dataclasses.replace(of, run=run), options=options)
    return float(found.summary["eval_loss"])


def relative(losses: list[float], others: list[float]) -> list[float]:
    """Return the relative differences, seed by seed."""
    return [a / b - 1 for a, b in zip(losses, others, strict=True)]


def difference(losses: list[float], others: list[float]) -> str:
    """Return the mean relative difference and its standard error."""
    found = relative(losses, others)
    if len(found) < 2:
        return f"{found[0]:+.2%}"
    error = statistics.stdev(found) / len(found) ** 0.5
    return f"{statistics.mean(found):+.2%} ± {error:.2%}"


if __name__ == "__main__":
    sys.exit(main())
