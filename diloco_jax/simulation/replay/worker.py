"""Processes that repeat islands as their own processes did it, and the pipes to them.

The numbers of threads and devices of a process decide how sums are cut, and with it
their bits. So islands whose processes differed in these numbers are repeated in
different processes, and islands of several hosts by as many processes in one
`jax.distributed` world: each gets every call, and the first process answers for all.

A call names a model copy and one of its methods. Calls are carried out in order. They
and their answers are MessagePack.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import subprocess
import sys
from collections.abc import Iterable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Literal

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
from diloco_jax.data.reader import Arrays
from diloco_jax.island.device.build import (
    build_exchange,
    build_trainer,
    compile_ahead,
    join,
    placed,
)
from diloco_jax.island.device.exchange import Restored
from diloco_jax.island.device.step import Trainer
from diloco_jax.island.mailbox import Arrival
from diloco_jax.island.world import Hosts, WorldAddress, join_world, leave_world
from diloco_jax.models.build import build_plan
from diloco_jax.models.model import Metrics, Model
from diloco_jax.protocol.messages import Version
from diloco_jax.simulation.replay.recording import Who, environment_like

WORKER = "diloco_jax.simulation.replay.worker"
STDERR = 2
ENDS_WITHIN_S = 10.0
"""Seconds in which a process whose pipe broke must end."""
ANSWERS_WITHIN_S = 3600.0
"""Seconds for an answer: a delta may be many steps away, and the first one waits for
the compiler.
"""
LOST_AFTER_S = 60.0
"""Seconds of silence after which a process of a world is lost, and the others end."""
COMPILED_WITHIN_S = 3600.0

Method = Literal[
    "begin", "step", "take", "adopt", "judge", "moments", "residual", "end"
]
"""Calls for one model copy; `take`, `moments` and `residual` are answered."""
ARRAY = 1
"""Type of an array in MessagePack: its dtype, its shape, its bytes."""


class Start(msgspec.Struct, frozen=True):
    """First message to a process. address: of its world, if it is one of several."""

    run: RunConfig
    hosts: int
    index: int
    address: str


def pack(message: Any) -> bytes:
    """Encode a message of builtins, configs and arrays."""
    return msgspec.msgpack.encode(message, enc_hook=_packed)


def unpack(data: bytes) -> Any:
    """Decode a message: sequences as lists, configs as dicts, arrays read-only."""
    return msgspec.msgpack.decode(data, ext_hook=_unpacked)


def _packed(array: npt.NDArray[Any]) -> msgspec.msgpack.Ext:
    parts = (array.dtype.name, array.shape, array.tobytes())
    return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode(parts))


def _unpacked(code: int, data: memoryview) -> npt.NDArray[Any]:
    dtype, shape, values = msgspec.msgpack.decode(data)
    return np.frombuffer(values, dtype).reshape(shape)


class WorkerError(RuntimeError):
    """A worker ended before its work was done; standard error has the reason."""


class Worker(contextlib.AbstractContextManager["Worker"]):
    """Processes like the recorded ones; they end with the `with` block or with this
    one.
    """

    def __init__(self, run: RunConfig, recorded: Environment) -> None:
        hosts = int(recorded["processes"])
        environment = {**island_environment(), **environment_like(recorded)}
        self._pipes: list[Connection] = []
        self._children: list[subprocess.Popen[bytes]] = []
        for _ in range(hosts):
            ours, theirs = Pipe()
            number = theirs.fileno()
            command = [sys.executable, "-P", "-m", WORKER, str(number)]
            self._children.append(
                start_child(
                    command,
                    environment,
                    subprocess.DEVNULL,
                    STDERR,
                    pass_fds=(number,),
                )
            )
            theirs.close()
            self._pipes.append(ours)
        where = f"127.0.0.1:{free_port()}" if hosts > 1 else ""
        for index, pipe in enumerate(self._pipes):
            self._send_to(pipe, Start(run, hosts, index, where))
        self.environment: Environment = self._answer()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for child in self._children:
            if kind is not None:
                child.kill()
            try:
                child.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def send(self, who: Who, method: Method, *arguments: Any) -> None:
        """Send a call; return before it is carried out. Raises WorkerError."""
        for pipe in self._pipes:
            self._send_to(pipe, (who, method, arguments))

    def ask(self, who: Who, method: Method, *arguments: Any) -> Any:
        """Send a call and wait for the answer. Raises WorkerError."""
        self.send(who, method, *arguments)
        return self._answer()

    def _send_to(self, pipe: Connection, message: Any) -> None:
        try:
            pipe.send_bytes(pack(message))
        except OSError as error:
            raise self._ended() from error

    def _answer(self) -> Any:
        try:
            if self._pipes[0].poll(ANSWERS_WITHIN_S):
                return unpack(self._pipes[0].recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended() from error
        raise self._ended()

    def _ended(self) -> WorkerError:
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(ENDS_WITHIN_S)
                return WorkerError(
                    f"a process that repeats islands ended with code {code}; see above"
                )
        return WorkerError(
            "a process that repeats islands no longer answers; see above"
        )


# ---- in the worker's process -------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Carry out calls until the other end is closed or this process is asked to end.

    Both are the regular end, so neither is reported.
    """
    with contextlib.suppress(EOFError, ConnectionError, KeyboardInterrupt):
        _serve(pipe)


def _serve(pipe: Connection) -> None:
    start = msgspec.msgpack.decode(pipe.recv_bytes(), type=Start)
    compilation.use_cache(compilation.of_user())
    hosts = None
    if start.address:
        where = WorldAddress(address=start.address, index=start.index)
        hosts = join_world(
            where, start.hosts, budget_s=LOST_AFTER_S, meet_s=10 * LOST_AFTER_S
        )
    copies = Copies(start.run, hosts)
    answer: Any = before_jax.describe_environment()
    while True:
        if answer is not None and start.index == 0:
            pipe.send_bytes(pack(answer))
        try:
            who, method, arguments = unpack(pipe.recv_bytes())
        except EOFError:
            break
        answer = copies.carry_out(Who(*who), method, arguments)
    if hosts is not None:
        leave_world()


class Copies:
    """Model copies of all incarnations that this process repeats."""

    def __init__(self, run: RunConfig, hosts: Hosts | None = None) -> None:
        """hosts: this process among several, which are all given the same calls."""
        self._run, self._hosts = run, hosts
        self._trainer_of = functools.cache(self._make_trainer)
        self._copies: dict[Who, _Copy] = {}

    def carry_out(self, who: Who, method: Method, arguments: Iterable[Any]) -> Any:
        """Carry out a call for one copy; return the answer, or None if it has none."""
        if method == "begin":
            config, *begun = arguments
            island = msgspec.convert(config, IslandConfig)
            # Islands that compute alike share compiled programs.
            alike = dataclasses.replace(island, step_seconds=0.0, stands_for="")
            self._copies[who] = _Copy(self._run, *self._trainer_of(alike), *begun)
        elif method == "end":
            del self._copies[who]
        else:
            return getattr(self._copies[who], method)(*arguments)
        return None

    def _make_trainer(self, island: IslandConfig) -> tuple[Model, Trainer]:
        """Compile on all hosts before one of them runs the program, as in
        `island/main.py`.
        """
        model, trainer = build_trainer(self._run, island)
        if self._hosts is not None:
            exchange, _ = build_exchange(self._run, model, trainer)
            compile_ahead(trainer, exchange, self._run.sequence_length)
            what = f"compiled {island}"
            self._hosts.meet(
                what, COMPILED_WITHIN_S, lambda: False, "COMPILED_WITHIN_S"
            )
        return model, trainer


class _Copy:
    """Model copy of one incarnation, as `replay.ReplayedIsland` calls it.

    anchors: in full, by fragment. moments, residuals: of a checkpoint, as the methods
    return them; without them the moments are fresh and the residuals zeros.
    """

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
        whole = {f: self._put(f, anchor) for f, anchor in enumerate(anchors)}
        begun = None
        if moments:
            kept = Restored(0, 0, moments, residuals or {})
            begun = placed(kept, trainer, self._exchange, self._put)
        plan = build_plan(run, model)
        self._replica = join(plan, trainer, self._exchange, whole, begun)
        self._last_metrics: Metrics | None = None
        self.judge = self._replica.judge

    def step(self, batch: Arrays, learning_rate: float) -> None:
        metrics = self._replica.step(batch, learning_rate)
        # As in the loop: at most one step ahead of the device.
        jax.block_until_ready(self._last_metrics)  # type: ignore[no-untyped-call]
        self._last_metrics = metrics

    def take(self, fragment: int) -> bytes:
        """Return the fragment's encoded delta, as it is uploaded."""
        arrays = [_whole(array) for array in self._replica.take(fragment)]
        return bytes(self._exchange.layouts_up[fragment].pack(arrays))

    def moments(self) -> list[npt.NDArray[Any]]:
        """Return the inner optimizer's state, by leaf."""
        return [_whole(leaf) for leaf in self._replica.trees()["moments"]]

    def residual(self, fragment: int) -> bytes:
        """Return the fragment's residual, as if no take were outstanding.

        It has the form of an anchor in full, and is empty without error feedback.
        """
        residuals = self._replica.trees()["residuals"]
        placed = self._exchange.layouts_whole[fragment].placed
        return _joined(
            own.piece.grid.to_tiles(_whole(array))
            for own, array in zip(placed, residuals[fragment], strict=True)
        )

    def adopt(
        self,
        fragment: int,
        version: Sequence[int],
        publishes: list[bytes],
        whole: bytes | None,
        keep: bool,
    ) -> None:
        """Adopt a version, given as its publishes or as its anchor in f32 tiles."""
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

    def _put(self, fragment: int, octets: bytes) -> tuple[jax.Array, ...]:
        """Place this process's share of all pieces, given as f32 tiles."""
        part = self._exchange.part_down(fragment)
        whole = self._exchange.layouts_whole[fragment].cut(octets, part)
        return self._exchange.put_anchor(fragment, _joined(whole))


def _whole(array: jax.Array) -> npt.NDArray[Any]:
    """Return the array's values; if several processes have it, all of them must ask."""
    if array.is_fully_addressable:
        return np.asarray(array)
    whole: npt.NDArray[Any] = process_allgather(array, tiled=True)
    return whole


def _joined(arrays: Iterable[npt.NDArray[Any]]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
