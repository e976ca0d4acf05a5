"""Messages of both ends of `replay_worker`, and the end that sends commands.

Commands are carried out in order; `Setup`, `TakeDelta`, `Moments` and `Residual` are
answered. Islands of several hosts are repeated by as many processes: each gets every
command, and the first process answers for all.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from multiprocessing import Pipe
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from diloco_jax.cluster.commands import free_port, island_environment
from diloco_jax.cluster.processes import start_child
from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.coordinator.notes import Environment
from diloco_jax.island.arrivals import Arrival
from diloco_jax.protocol.island.books import Outcome
from diloco_jax.protocol.values import Version
from diloco_jax.simulation.replay.recording import Who, environment_like

STDERR = 2
ENDS_WITHIN_S = 10.0
"""Seconds in which a process whose pipe broke must end."""
ANSWERS_WITHIN_S = 3600.0
"""Seconds for an answer: a delta may be many steps away, and the first one waits for
the compiler.
"""


class WorkerError(RuntimeError):
    """A worker ended before its work was done; standard error has the reason."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First command; answered with the facts of `environment.describe`, as JSON.

    hosts, index, address: place in the world of processes, if there are several.
    """

    run: RunConfig
    hosts: int = 1
    index: int = 0
    address: str = ""


class PipeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Command to the model copy of one incarnation."""

    who: Who


class BeginCopy(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Join with these anchors, in full, by fragment."""

    island: IslandConfig
    anchors: list[bytes]
    moments: list[bytes] = []
    """Moments of a checkpoint, as `Moments` returns them; empty for fresh ones."""
    residuals: dict[int, bytes] = {}
    """Residuals of a checkpoint, as `Residual` returns them, by fragment; zeros
    elsewhere.
    """


class MakeStep(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Do one inner step; batch: int32 [B, T + 1], row-major, little-endian."""

    batch: bytes
    learning_rate: float


class TakeDelta(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Take a fragment; answered with its encoded delta, as it is uploaded."""

    fragment: int


class Adopt(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Adopt a version by its encoded publishes, oldest first.

    keep: see `boundary.Arrays`.
    """

    fragment: int
    version: Version
    publishes: list[bytes]
    keep: bool


class Judge(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Apply the outcome of the outstanding take: see `boundary.Arrays`."""

    fragment: int
    outcome: Outcome


class Moments(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Return the inner optimizer's state, by leaf, encoded by msgpack."""


class Residual(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Return the fragment's residual as if no take were outstanding.

    It has the form of an anchor in full, and is empty without error feedback.
    """

    fragment: int


class End(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Drop the incarnation, which is not needed any more."""


AnyCommand = (
    Setup | BeginCopy | MakeStep | TakeDelta | Adopt | Judge | Moments | Residual | End
)

decode = msgspec.msgpack.Decoder(AnyCommand).decode


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
            self._send_to(
                process, Setup(run=run, hosts=hosts, index=index, address=address)
            )
        self.environment: Environment = msgspec.json.decode(self._answer())

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

    def send(self, command: AnyCommand) -> None:
        """Send a command; return before it is carried out. Raises WorkerError."""
        for process in self._processes:
            self._send_to(process, command)

    def ask(self, command: AnyCommand) -> bytes:
        """Send a command and wait for the answer. Raises WorkerError."""
        self.send(command)
        return self._answer()

    def _send_to(self, process: _Process, command: AnyCommand) -> None:
        try:
            process.connection.send_bytes(msgspec.msgpack.encode(command))
        except OSError as error:
            raise self._ended() from error

    def _answer(self) -> bytes:
        connection = self._processes[0].connection
        try:
            if connection.poll(ANSWERS_WITHIN_S):
                return connection.recv_bytes()
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
            [sys.executable, "-m", "diloco_jax.simulation.replay.worker", str(number)],
            environment,
            subprocess.DEVNULL,
            STDERR,
            pass_fds=(number,),
        )
        theirs.close()


class RemoteReplica:
    """Model copy of one incarnation, in a worker; also `boundary.Arrays`."""

    def __init__(self, worker: Worker, begin: BeginCopy) -> None:
        self._worker, self._who = worker, begin.who
        worker.send(begin)

    def step(self, batch: npt.NDArray[np.int32], learning_rate: float) -> None:
        """Do one inner step on int32 [B, T + 1]."""
        octets = batch.astype("<i4").tobytes()
        self._send(MakeStep, batch=octets, learning_rate=learning_rate)

    def take(self, fragment: int) -> bytes:
        """Return the fragment's encoded delta."""
        return self._worker.ask(TakeDelta(who=self._who, fragment=fragment))

    def moments(self) -> list[bytes]:
        """Return the inner optimizer's state, by leaf."""
        answer = self._worker.ask(Moments(who=self._who))
        return msgspec.msgpack.decode(answer, type=list[bytes])

    def residual(self, fragment: int) -> bytes:
        """Return the fragment's residual, as if no take were outstanding."""
        return self._worker.ask(Residual(who=self._who, fragment=fragment))

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        """See Arrays; each publish is given as its payload."""
        self._send(
            Adopt,
            fragment=arrival.fragment,
            version=arrival.version,
            publishes=[payload for (payload,) in arrival.publishes],
            keep=keep,
        )

    def judge(self, fragment: int, outcome: Outcome) -> None:
        """See Arrays."""
        self._send(Judge, fragment=fragment, outcome=outcome)

    def end(self) -> None:
        """Drop the model copy, which is not needed any more."""
        self._send(End)

    def _send(self, command: type[Any], **fields: Any) -> None:
        self._worker.send(command(who=self._who, **fields))
