"""Process that repeats the computation of islands as their own processes did it.

The numbers of threads and devices of a process decide how sums are cut, and with it
their bits. So islands whose processes differed in these numbers are repeated in
different processes, and islands of several hosts by as many processes in one
`jax.distributed` world.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import jax
import msgspec
import numpy as np
import numpy.typing as npt
from jax.experimental.multihost_utils import process_allgather

from diloco_jax import compilation, environment
from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.core.tiles import TileGrid
from diloco_jax.island.arrivals import Arrival
from diloco_jax.island.device.build import (
    build_exchange,
    build_trainer,
    compile_ahead,
    join,
)
from diloco_jax.island.device.placing import place
from diloco_jax.island.device.replica import Restored
from diloco_jax.island.device.step import Trainer
from diloco_jax.island.hosts.meeting import WorldAddress
from diloco_jax.island.hosts.world import Hosts, join_world, leave_world
from diloco_jax.models.model import Metrics, Model
from diloco_jax.models.plan import build_plan
from diloco_jax.simulation.replay.pipe import (
    Adopt,
    AnyCommand,
    BeginCopy,
    End,
    Judge,
    MakeStep,
    Moments,
    Residual,
    Setup,
    TakeDelta,
    decode,
)
from diloco_jax.simulation.replay.recording import Who

LOST_AFTER_S = 60.0
"""Seconds of silence after which a process of a world is lost, and the others end."""
COMPILED_WITHIN_S = 3600.0


def serve(connection: Connection) -> None:
    """Carry out commands until the other end is closed or this process is asked to end.

    Both are the regular end, so neither is reported.
    """
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        _serve(connection)


def _serve(connection: Connection) -> None:
    setup = decode(connection.recv_bytes())
    assert isinstance(setup, Setup)
    compilation.use_cache(compilation.of_user())
    hosts = None
    if setup.hosts > 1:
        where = WorldAddress(address=setup.address, index=setup.index)
        hosts = join_world(
            where, setup.hosts, budget_s=LOST_AFTER_S, meet_s=10 * LOST_AFTER_S
        )
    described = msgspec.json.encode(environment.describe())
    if setup.index == 0:
        connection.send_bytes(described)
    copies = Copies(setup.run, hosts)
    while True:
        try:
            command = decode(connection.recv_bytes())
        except EOFError:
            break
        answer = copies.carry_out(command)
        if answer is not None and setup.index == 0:
            connection.send_bytes(answer)
    if hosts is not None:
        leave_world()


class Copies:
    """Model copies of all incarnations that this process repeats."""

    def __init__(self, run: RunConfig, hosts: Hosts | None = None) -> None:
        """hosts: this process among several, which are all given the same commands."""
        self._run, self._hosts = run, hosts
        self._trainer_of = functools.cache(self._make_trainer)
        self._copies: dict[Who, _Copy] = {}

    def carry_out(self, command: AnyCommand) -> bytes | bytearray | None:
        """Carry out one command; return the answer, if it has one."""
        match command:
            case BeginCopy(who=who):
                # Islands that compute alike share compiled programs.
                alike = dataclasses.replace(
                    command.island, step_seconds=0.0, stands_for=""
                )
                model, trainer = self._trainer_of(alike)
                self._copies[who] = _Copy(self._run, model, trainer, command)
            case MakeStep(who=who):
                self._copies[who].step(command)
            case TakeDelta(who=who):
                return self._copies[who].take(command.fragment)
            case Adopt(who=who):
                self._copies[who].adopt(command)
            case Judge(who=who):
                self._copies[who].replica.judge(command.fragment, command.outcome)
            case Moments(who=who):
                return self._copies[who].moments()
            case Residual(who=who):
                return self._copies[who].residual(command.fragment)
            case End(who=who):
                del self._copies[who]
        return None

    def _make_trainer(self, island: IslandConfig) -> tuple[Model, Trainer]:
        """Compile on all hosts before one of them runs the program, as in
        `island/host.py`.
        """
        model, trainer = build_trainer(self._run, island)
        if self._hosts is not None:
            exchange, params = build_exchange(self._run, model, trainer)
            compile_ahead(trainer, exchange, params, self._run.sequence_length)
            what = f"compiled {island}"
            self._hosts.meet(
                what, COMPILED_WITHIN_S, lambda: False, "COMPILED_WITHIN_S"
            )
        return model, trainer


class _Copy:
    """Model copy of one incarnation."""

    def __init__(
        self, run: RunConfig, model: Model, trainer: Trainer, begin: BeginCopy
    ) -> None:
        self._sequences = trainer.batch_size
        self._exchange, _ = build_exchange(run, model, trainer)
        placed = {f: self._put(f, anchor) for f, anchor in enumerate(begin.anchors)}
        restored = None
        if begin.moments:
            restored = Restored(
                incarnation=0,
                steps=0,
                moments=_placed_moments(trainer, begin.moments),
                residuals={
                    f: self._exchange.gather(f, self._put(f, r))
                    for f, r in sorted(begin.residuals.items())
                },
            )
        plan = build_plan(run, model)
        self.replica = join(plan, trainer, self._exchange, placed, restored)
        self._last_metrics: Metrics | None = None

    def step(self, step: MakeStep) -> None:
        batch = np.frombuffer(step.batch, "<i4").reshape(self._sequences, -1)
        metrics = self.replica.step(batch, step.learning_rate)
        # As in the loop: at most one step ahead of the device.
        jax.block_until_ready(self._last_metrics)  # type: ignore[no-untyped-call]
        self._last_metrics = metrics

    def take(self, fragment: int) -> bytearray:
        arrays = [_whole(array) for array in self.replica.take(fragment)]
        return self._exchange.layouts_up[fragment].pack(arrays)

    def moments(self) -> bytes:
        leaves = self.replica.trees()["moments"]
        return msgspec.msgpack.encode([_whole(leaf).tobytes() for leaf in leaves])

    def residual(self, fragment: int) -> bytes:
        residuals = self.replica.trees()["residuals"]
        tiles = (
            TileGrid.of(array.shape).to_tiles(_whole(array))
            for array in residuals[fragment]
        )
        return _joined(tiles)

    def adopt(self, adopt: Adopt) -> None:
        fragment, exchange = adopt.fragment, self._exchange
        layout, part = exchange.layouts_down[fragment], exchange.part_down(fragment)
        parts = [_joined(layout.cut(p, part)) for p in adopt.publishes]
        arrival = Arrival(
            fragment=fragment,
            version=adopt.version,
            publishes=tuple(exchange.put_publish(fragment, p) for p in parts),
        )
        self.replica.adopt(arrival, keep=adopt.keep)

    def _put(self, fragment: int, octets: bytes) -> tuple[jax.Array, ...]:
        """Place this process's share of all pieces, given as f32 tiles."""
        layout = self._exchange.layouts_down[fragment]
        values = [piece for _, piece in layout.split_values(octets, ())]
        part = layout.cut_values(values, self._exchange.part_down(fragment))
        return self._exchange.put_anchor(fragment, _joined(part))


def _whole(array: jax.Array) -> npt.NDArray[Any]:
    """Return the array's values; if several processes have it, all of them must ask."""
    if array.is_fully_addressable:
        return np.asarray(array)
    whole: npt.NDArray[Any] = process_allgather(array, tiled=True)
    return whole


def _joined(arrays: Iterable[npt.NDArray[Any]]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def _placed_moments(trainer: Trainer, octets: list[bytes]) -> Any:
    like, structure = jax.tree.flatten(trainer.abstract_state().opt_state)
    leaves = [
        place(np.frombuffer(raw, leaf.dtype).reshape(leaf.shape), leaf.sharding)
        for leaf, raw in zip(like, octets, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
