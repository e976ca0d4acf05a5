"""Processes that repeat islands (`worker.py`), and the pipes to them.

A call names a model copy and one of its methods. Calls are carried out in order. Both
ends speak MessagePack, in which an array is dtype, shape and bytes. Islands of several
hosts are repeated by as many processes: each gets every call, and the first process
answers for all.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from multiprocessing import Pipe
from types import TracebackType
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from diloco_jax.cluster.cluster import free_port, island_environment
from diloco_jax.cluster.processes import start_child
from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.coordinator.journal import Environment
from diloco_jax.data.batches import Arrays
from diloco_jax.island.mailbox import Arrival
from diloco_jax.protocol.island.books import Outcome
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
