"""Processes that repeat islands as their own processes did it, and the pipes to them.

The numbers of threads and devices of a process decide how sums are cut, and with it
their bits. So islands whose processes differed in these numbers are repeated in
different processes, and islands of several hosts by as many processes in one
`jax.distributed` world: each gets every call, and the first process answers for all.

A call names a model copy and one of its methods. Calls are carried out in order. Both
ends speak MessagePack, in which an array is dtype, shape and bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal, TypeVar

import jax
import msgspec
import numpy as np
import numpy.typing as npt
from jax.experimental.multihost_utils import process_allgather

from diloco_jax import before_jax, compilation
from diloco_jax.cluster.cluster import free_port, island_environment
from diloco_jax.cluster.processes import start_child
from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.coordinator.journal import Environment
from diloco_jax.core.tiles import TileGrid
from diloco_jax.data.batches import Arrays
from diloco_jax.island.device.build import (
    build_exchange,
    build_trainer,
    compile_ahead,
    join,
)
from diloco_jax.island.device.mesh import place
from diloco_jax.island.device.replica import Restored
from diloco_jax.island.device.step import Trainer
from diloco_jax.island.hosts.world import Hosts, WorldAddress, join_world, leave_world
from diloco_jax.island.mailbox import Arrival
from diloco_jax.models.build import build_plan
from diloco_jax.models.model import Metrics, Model
from diloco_jax.protocol.island.books import Outcome
from diloco_jax.protocol.values import Version
from diloco_jax.simulation.replay.recording import Who, environment_like

WORKER = "diloco_jax.simulation.replay.worker"
STDERR = 2
ENDS_WITHIN_S = 10.0
"""Seconds in which a process whose pipe broke must end."""
ANSWERS_WITHIN_S = 3600.0
"""Seconds for an answer: a delta may be many steps away, and the first one waits for
the compiler.
"""

Method = Literal[
    "begin", "step", "take", "adopt", "judge", "moments", "residual", "end"
]
"""Calls for one model copy; `take`, `moments` and `residual` are answered."""

T = TypeVar("T")


class WorkerError(RuntimeError):
    """A worker ended before its work was done; standard error has the reason."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """First message; answered with the facts of `environment.describe`.

    hosts, index, address: place in the world of processes, if there are several.
    """

    run: RunConfig
    hosts: int = 1
    index: int = 0
    address: str = ""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """One call for one model copy. Of the arguments only arrays keep their type: a
    tuple arrives as a list, a config as a dict."""

    who: Who
    method: Method
    arguments: list[Any]


def encode(message: Any) -> bytes:
    """Return a message of the pipe as bytes."""
    return msgspec.msgpack.encode(message, enc_hook=_as_extension)


def decode(octets: bytes, kind: type[T]) -> T:
    """Return the message of that type; its arrays are read-only."""
    return msgspec.msgpack.decode(octets, type=kind, ext_hook=_as_array)


ARRAY = 1
"""Code of arrays among MessagePack's extensions."""


def _as_extension(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a {type(value).__name__} cannot be sent to a worker")
    parts = value.dtype.name, value.shape, value.tobytes()
    return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(parts))


def _as_array(code: int, octets: memoryview) -> npt.NDArray[Any]:
    assert code == ARRAY, f"extension {code} is not one of the pipe's"
    kind = tuple[str, tuple[int, ...], bytes]
    name, shape, values = msgspec.msgpack.decode(octets, type=kind)
    return np.frombuffer(values, np.dtype(name)).reshape(shape)


class Worker:
    """Processes like the recorded ones; they end with the `with` block or with this
    one.
    """

    def __init__(self, run: RunConfig, recorded: Environment) -> None:
        hosts = int(recorded["processes"])
        environment = {**island_environment(), **environment_like(recorded)}
        self._processes = [_Process(environment) for _ in range(hosts)]
        address = f"127.0.0.1:{free_port()}" if hosts > 1 else ""
        for index, process in enumerate(self._processes):
            setup = Setup(run=run, hosts=hosts, index=index, address=address)
            self._send_to(process, encode(setup))
        self.environment: Environment = self._answer()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.connection.close()
        for process in self._processes:
            if kind is not None:
                process.child.kill()
            try:
                process.child.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.child.kill()
                process.child.wait()

    def send(self, who: Who, method: Method, *arguments: Any) -> None:
        """Send a call; return before it is carried out. Raises WorkerError."""
        octets = encode(Call(who, method, list(arguments)))
        for process in self._processes:
            self._send_to(process, octets)

    def ask(self, who: Who, method: Method, *arguments: Any) -> Any:
        """Send a call and wait for the answer. Raises WorkerError."""
        self.send(who, method, *arguments)
        return self._answer()

    def _send_to(self, process: _Process, octets: bytes) -> None:
        try:
            process.connection.send_bytes(octets)
        except OSError as error:
            raise self._ended() from error

    def _answer(self) -> Any:
        connection = self._processes[0].connection
        try:
            if connection.poll(ANSWERS_WITHIN_S):
                return decode(connection.recv_bytes(), object)
        except (EOFError, OSError) as error:
            raise self._ended() from error
        raise self._ended()

    def _ended(self) -> WorkerError:
        codes = []
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes.append(process.child.wait(ENDS_WITHIN_S))
        return WorkerError(
            f"a process that repeats islands ended with code {codes[0]}; see above"
            if codes
            else "a process that repeats islands no longer answers; see above"
        )


class _Process:
    """One process of a worker, and this end of its pipe."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.connection, theirs = Pipe()
        number = theirs.fileno()
        self.child = start_child(
            [sys.executable, "-P", "-m", WORKER, str(number)],
            environment,
            subprocess.DEVNULL,
            STDERR,
            pass_fds=(number,),
        )
        theirs.close()


class RemoteReplica:
    """Model copy of one incarnation, in a worker; also `boundary.Arrays`.

    anchors: in full, by fragment. moments, residuals: of a checkpoint, as the methods
    return them; without them the moments are fresh and the residuals zeros.
    """

    def __init__(
        self,
        worker: Worker,
        who: Who,
        island: IslandConfig,
        anchors: list[bytes],
        moments: list[npt.NDArray[Any]] | None = None,
        residuals: dict[int, bytes] | None = None,
    ) -> None:
        self._worker, self._who = worker, who
        worker.send(who, "begin", island, anchors, moments, residuals)

    def step(self, batch: Arrays, learning_rate: float) -> None:
        """Make one inner step on a batch's arrays by name."""
        self._worker.send(self._who, "step", batch, learning_rate)

    def take(self, fragment: int) -> bytes:
        """Return the fragment's encoded delta, as it is uploaded."""
        delta: bytes = self._worker.ask(self._who, "take", fragment)
        return delta

    def moments(self) -> list[npt.NDArray[Any]]:
        """Return the inner optimizer's state, by leaf."""
        moments: list[npt.NDArray[Any]] = self._worker.ask(self._who, "moments")
        return moments

    def residual(self, fragment: int) -> bytes:
        """Return the fragment's residual, as if no take were outstanding.

        It has the form of an anchor in full, and is empty without error feedback.
        """
        residual: bytes = self._worker.ask(self._who, "residual", fragment)
        return residual

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        """Adopt a version whose publishes are given as their payloads, or its anchor as
        f32 tiles."""
        payloads = [bytes(payload) for (payload,) in arrival.publishes]
        whole = arrival.anchor and arrival.anchor[0]
        fragment, version = arrival.fragment, arrival.version
        self._worker.send(self._who, "adopt", fragment, version, payloads, whole, keep)

    def judge(self, fragment: int, outcome: Outcome) -> None:
        self._worker.send(self._who, "judge", fragment, outcome)

    def end(self) -> None:
        """Drop the model copy, which is not needed any more."""
        self._worker.send(self._who, "end")


LOST_AFTER_S = 60.0
"""Seconds of silence after which a process of a world is lost, and the others end."""
COMPILED_WITHIN_S = 3600.0


def serve(connection: Connection) -> None:
    """Carry out calls until the other end is closed or this process is asked to end.

    Both are the regular end, so neither is reported.
    """
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        _serve(connection)


def _serve(connection: Connection) -> None:
    setup = decode(connection.recv_bytes(), Setup)
    compilation.use_cache(compilation.of_user())
    hosts = None
    if setup.hosts > 1:
        where = WorldAddress(address=setup.address, index=setup.index)
        hosts = join_world(
            where, setup.hosts, budget_s=LOST_AFTER_S, meet_s=10 * LOST_AFTER_S
        )
    described = before_jax.describe_environment()
    if setup.index == 0:
        connection.send_bytes(encode(described))
    copies = Copies(setup.run, hosts)
    while True:
        try:
            call = decode(connection.recv_bytes(), Call)
        except EOFError:
            break
        answer = copies.carry_out(call)
        if answer is not None and setup.index == 0:
            connection.send_bytes(encode(answer))
    if hosts is not None:
        leave_world()


class Copies:
    """Model copies of all incarnations that this process repeats."""

    def __init__(self, run: RunConfig, hosts: Hosts | None = None) -> None:
        """hosts: this process among several, which are all given the same calls."""
        self._run, self._hosts = run, hosts
        self._trainer_of = functools.cache(self._make_trainer)
        self._copies: dict[Who, _Copy] = {}

    def carry_out(self, call: Call) -> Any:
        """Carry out a call for one copy; return the answer, or None if it has none."""
        if call.method == "begin":
            self._begin(call.who, *call.arguments)
        elif call.method == "end":
            del self._copies[call.who]
        else:
            return getattr(self._copies[call.who], call.method)(*call.arguments)
        return None

    def _begin(self, who: Who, config: dict[str, Any], *begun: Any) -> None:
        island = msgspec.convert(config, IslandConfig)
        # Islands that compute alike share compiled programs.
        alike = dataclasses.replace(island, step_seconds=0.0, stands_for="", offers="")
        self._copies[who] = _Copy(self._run, *self._trainer_of(alike), *begun)

    def _make_trainer(self, island: IslandConfig) -> tuple[Model, Trainer]:
        """Compile on all hosts before one of them runs the program, as in
        `island/parts.py`.
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
    """Model copy of one incarnation, as `pipe.RemoteReplica` calls it."""

    def __init__(
        self,
        run: RunConfig,
        model: Model,
        trainer: Trainer,
        anchors: list[bytes],
        moments: list[npt.NDArray[Any]] | None,
        residuals: dict[int, bytes] | None,
    ) -> None:
        self._exchange, _ = build_exchange(run, model, trainer)
        placed = {f: self._put(f, anchor) for f, anchor in enumerate(anchors)}
        restored = None
        if moments:
            restored = Restored(
                incarnation=0,
                steps=0,
                moments=_placed_moments(trainer, moments),
                residuals={
                    f: self._exchange.gather(f, self._put(f, r))
                    for f, r in sorted((residuals or {}).items())
                },
            )
        plan = build_plan(run, model)
        self._replica = join(plan, trainer, self._exchange, placed, restored)
        self._last_metrics: Metrics | None = None

    def step(self, batch: Arrays, learning_rate: float) -> None:
        metrics = self._replica.step(batch, learning_rate)
        # As in the loop: at most one step ahead of the device.
        jax.block_until_ready(self._last_metrics)  # type: ignore[no-untyped-call]
        self._last_metrics = metrics

    def take(self, fragment: int) -> bytearray:
        arrays = [_whole(array) for array in self._replica.take(fragment)]
        return self._exchange.layouts_up[fragment].pack(arrays)

    def moments(self) -> list[npt.NDArray[Any]]:
        return [_whole(leaf) for leaf in self._replica.trees()["moments"]]

    def residual(self, fragment: int) -> bytes:
        residuals = self._replica.trees()["residuals"]
        tiles = (
            TileGrid.of(array.shape).to_tiles(_whole(array))
            for array in residuals[fragment]
        )
        return _joined(tiles)

    def adopt(
        self,
        fragment: int,
        version: list[int],
        publishes: list[bytes],
        whole: bytes | None,
        keep: bool,
    ) -> None:
        exchange = self._exchange
        layout, part = exchange.layouts_down[fragment], exchange.part_down(fragment)
        parts = [_joined(layout.cut(publish, part)) for publish in publishes]
        arrival = Arrival(
            fragment=fragment,
            version=Version(*version),
            anchor=None if whole is None else self._put(fragment, whole),
            publishes=tuple(exchange.put_publish(fragment, p) for p in parts),
        )
        self._replica.adopt(arrival, keep=keep)

    def judge(self, fragment: int, outcome: Outcome) -> None:
        self._replica.judge(fragment, outcome)

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


def _placed_moments(trainer: Trainer, values: list[npt.NDArray[Any]]) -> Any:
    like, structure = jax.tree.flatten(trainer.abstract_state().opt_state)
    leaves = [
        place(value, leaf.sharding) for leaf, value in zip(like, values, strict=True)
    ]
    return jax.tree.unflatten(structure, leaves)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
