"""Both ends' messages of `replay_worker`, and the end that commands it.

Commands are carried out in order; `Setup`, `Take`, `Moments` and `Residual` are
answered. Islands of several hosts are repeated by as many processes: each is given
every command, and the first one answers for all.
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
"""A process whose pipe is broken has ended, or is about to."""
ANSWERS_WITHIN_S = 3600.0
"""A delta may be many steps away, and the first one waits for the compiler."""


class WorkerError(RuntimeError):
    """A worker ended before its work was done; it said why on standard error."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first command; answered with what `environment.describe` says, as JSON.

    hosts, index, address: of the world of processes, if there are several.
    """

    run: RunConfig
    hosts: int = 1
    index: int = 0
    address: str = ""


class PipeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """To the model copy of one incarnation."""

    who: Who


class BeginCopy(PipeCommand, frozen=True, kw_only=True, tag=True):
    """It joins with these anchors, in full, by fragment."""

    island: IslandConfig
    anchors: list[bytes]
    moments: list[bytes] = []
    """Of a checkpoint, as `Moments` gives them; fresh ones if there are none."""
    residuals: dict[int, bytes] = {}
    """Of a checkpoint, as `Residual` gives them, by fragment; zeros elsewhere."""


class MakeStep(PipeCommand, frozen=True, kw_only=True, tag=True):
    """One inner step; batch: int32 [B, T + 1], row-major, little-endian."""

    batch: bytes
    learning_rate: float


class TakeDelta(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Answered with the fragment's encoded delta, as it is uploaded."""

    fragment: int


class Adopt(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Encoded publishes, oldest first, lead to the version. keep: see
    `boundary.Arrays`."""

    fragment: int
    version: Version
    publishes: list[bytes]
    keep: bool


class Judge(PipeCommand, frozen=True, kw_only=True, tag=True):
    """What became of the outstanding take: see `boundary.Arrays`."""

    fragment: int
    outcome: Outcome


class Moments(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Answered with the inner optimizer's state, by leaf, encoded by msgpack."""


class Residual(PipeCommand, frozen=True, kw_only=True, tag=True):
    """Answered with the fragment's residual, as if no take were outstanding, like an
    anchor in full; empty without error feedback."""

    fragment: int


class End(PipeCommand, frozen=True, kw_only=True, tag=True):
    """The incarnation is not needed any more."""


AnyCommand = (
    Setup | BeginCopy | MakeStep | TakeDelta | Adopt | Judge | Moments | Residual | End
)

decode = msgspec.msgpack.Decoder(AnyCommand).decode


class Worker:
    """Processes like the recorded ones, which end with the `with` block, or with us."""

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
        """Returns before it is carried out. Raises WorkerError."""
        for process in self._processes:
            self._send_to(process, command)

    def ask(self, command: AnyCommand) -> bytes:
        """Waits for the answer. Raises WorkerError."""
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
            else "a process that repeats islands answers no more; see above"
        )


class _Process:
    """One of them, and our end of its pipe."""

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
    """The model copy of one incarnation, in a worker; also `boundary.Arrays`."""

    def __init__(self, worker: Worker, begin: BeginCopy) -> None:
        self._worker, self._who = worker, begin.who
        worker.send(begin)

    def step(self, batch: npt.NDArray[np.int32], learning_rate: float) -> None:
        """One inner step on int32 [B, T + 1]."""
        octets = batch.astype("<i4").tobytes()
        self._send(MakeStep, batch=octets, learning_rate=learning_rate)

    def take(self, fragment: int) -> bytes:
        """The fragment's encoded delta."""
        return self._worker.ask(TakeDelta(who=self._who, fragment=fragment))

    def moments(self) -> list[bytes]:
        """The inner optimizer's state, by leaf."""
        answer = self._worker.ask(Moments(who=self._who))
        return msgspec.msgpack.decode(answer, type=list[bytes])

    def residual(self, fragment: int) -> bytes:
        """The fragment's residual, as if no take were outstanding."""
        return self._worker.ask(Residual(who=self._who, fragment=fragment))

    def adopt(self, arrival: Arrival, *, keep: bool) -> None:
        """See Arrays; of each publish there is the payload."""
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
        """It is not needed any more."""
        self._send(End)

    def _send(self, command: type[Any], **fields: Any) -> None:
        self._worker.send(command(who=self._who, **fields))
