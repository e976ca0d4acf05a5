"""A process that computes what islands computed, as their processes did.

How many threads and devices a process has decides how sums are cut, and with it their
bits; so islands whose processes differed in that are repeated in different ones.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np

from diloco_jax import compilation, environment
from diloco_jax.config import RunConfig
from diloco_jax.island.build import build_exchange, build_trainer, join
from diloco_jax.island.mailbox import Arrival
from diloco_jax.island.placing import place
from diloco_jax.island.replica import Restored
from diloco_jax.island.step import Trainer
from diloco_jax.models.model import Metrics, Model
from diloco_jax.models.plan import build_plan
from diloco_jax.simulation.recording import Who
from diloco_jax.simulation.replay_pipe import (
    Adopt,
    AnyCommand,
    Begin,
    End,
    Judge,
    Moments,
    Residual,
    Setup,
    Step,
    Take,
    decode,
)


def serve(connection: Connection) -> None:
    """Carries out commands until the other end is closed."""
    setup = decode(connection.recv_bytes())
    assert isinstance(setup, Setup)
    # In the folder that the environment names.
    compilation.use_cache(Path())
    connection.send_bytes(msgspec.json.encode(environment.describe()))
    copies = Copies(setup.run)
    while True:
        try:
            command = decode(connection.recv_bytes())
        except EOFError:
            return
        answer = copies.carry_out(command)
        if answer is not None:
            connection.send_bytes(answer)


class Copies:
    """The model copies of all incarnations that this process repeats."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._trainer_of = functools.cache(functools.partial(build_trainer, run))
        self._copies: dict[Who, _Copy] = {}

    def carry_out(self, command: AnyCommand) -> bytes | bytearray | None:
        """One command; returns the answer, if it has one."""
        match command:
            case Begin(who=who):
                # Islands that compute alike share what is compiled.
                alike = dataclasses.replace(
                    command.island, step_seconds=0.0, stands_for=""
                )
                model, trainer = self._trainer_of(alike)
                self._copies[who] = _Copy(self._run, model, trainer, command)
            case Step(who=who):
                self._copies[who].step(command)
            case Take(who=who):
                return self._copies[who].take(command.fragment)
            case Adopt(who=who):
                self._copies[who].adopt(command)
            case Judge(who=who):
                self._copies[who].judge(command)
            case Moments(who=who):
                return self._copies[who].moments()
            case Residual(who=who):
                return self._copies[who].residual(command.fragment)
            case End(who=who):
                del self._copies[who]
        return None


class _Copy:
    """The model copy of one incarnation."""

    def __init__(
        self, run: RunConfig, model: Model, trainer: Trainer, begin: Begin
    ) -> None:
        self._sequences = trainer.batch_size
        self._exchange, _ = build_exchange(run, model, trainer)
        put = self._exchange.put_anchor
        placed = {f: put(f, anchor) for f, anchor in enumerate(begin.anchors)}
        restored = None
        if begin.moments:
            restored = Restored(
                incarnation=0,
                steps=0,
                moments=_placed_moments(trainer, begin.moments),
                residuals={f: put(f, octets) for f, octets in begin.residuals.items()},
            )
        plan = build_plan(run, model)
        self._replica = join(plan, trainer, self._exchange, placed, restored)
        self._last_metrics: Metrics | None = None

    def step(self, step: Step) -> None:
        batch = np.frombuffer(step.batch, "<i4").reshape(self._sequences, -1)
        metrics = self._replica.step(batch, step.learning_rate)
        # As in the loop: at most one step ahead of the device.
        jax.block_until_ready(self._last_metrics)  # type: ignore[no-untyped-call]
        self._last_metrics = metrics

    def take(self, fragment: int) -> bytearray:
        arrays = [np.asarray(array) for array in self._replica.take(fragment)]
        return self._exchange.layouts_up[fragment].pack(arrays)

    def moments(self) -> bytes:
        leaves = self._replica.trees()["moments"]
        return msgspec.msgpack.encode([np.asarray(leaf).tobytes() for leaf in leaves])

    def residual(self, fragment: int) -> bytes:
        residuals = self._replica.trees()["residuals"]
        return b"".join(np.asarray(array).tobytes() for array in residuals[fragment])

    def adopt(self, adopt: Adopt) -> None:
        put = self._exchange.put_publish
        arrival = Arrival(
            fragment=adopt.fragment,
            version=adopt.version,
            publishes=tuple(put(adopt.fragment, p) for p in adopt.publishes),
        )
        self._replica.adopt(arrival)

    def judge(self, judge: Judge) -> None:
        match judge.outcome:
            case "settle":
                self._replica.settle(judge.fragment)
            case "reopen":
                self._replica.reopen(judge.fragment)
            case "drop":
                self._replica.drop(judge.fragment)
            case "reset":
                self._replica.reset(judge.fragment)


def _placed_moments(trainer: Trainer, octets: list[bytes]) -> Any:
    like, structure = jax.tree.flatten(trainer.abstract_state().opt_state)
    leaves = [
        place(np.frombuffer(raw, leaf.dtype).reshape(leaf.shape), leaf.sharding)
        for leaf, raw in zip(like, octets, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
