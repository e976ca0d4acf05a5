"""Both ends' messages of a `replay_worker`, and the end that commands it.

Commands are carried out in order; `Setup`, `Take`, `Moments` and `Residual` are
answered.
"""

from __future__ import annotations

import subprocess
import sys
from multiprocessing import Pipe
from types import TracebackType
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from diloco_jax.cluster.commands import island_environment
from diloco_jax.cluster.processes import start_child
from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.island.mailbox import Arrival
from diloco_jax.policy.events import Version
from diloco_jax.simulation.recording import Environment, Who, environment_like

STDERR = 2


class WorkerError(RuntimeError):
    """A worker ended before its work was done; it said why on standard error."""


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first command; answered with what `environment.describe` says, as JSON."""

    run: RunConfig


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """To the model copy of one incarnation."""

    who: Who


class Begin(Command, frozen=True, kw_only=True, tag=True):
    """It joins with these anchors, in full, by fragment."""

    island: IslandConfig
    anchors: list[bytes]
    moments: list[bytes] = []
    """Of a checkpoint, as `Moments` gives them; fresh ones if there are none."""
    residuals: dict[int, bytes] = {}
    """Of a checkpoint, as `Residual` gives them, by fragment; zeros elsewhere."""


class Step(Command, frozen=True, kw_only=True, tag=True):
    """One inner step; batch: int32 [B, T + 1], row-major, little-endian."""

    batch: bytes
    learning_rate: float


class Take(Command, frozen=True, kw_only=True, tag=True):
    """Answered with the fragment's encoded delta, as it is uploaded."""

    fragment: int


class Adopt(Command, frozen=True, kw_only=True, tag=True):
    """Encoded publishes, oldest first, lead to the version."""

    fragment: int
    version: Version
    publishes: list[bytes]


class Judge(Command, frozen=True, kw_only=True, tag=True):
    """What became of the outstanding take: see `boundary.Arrays`."""

    fragment: int
    outcome: Literal["settle", "reopen", "drop", "reset"]


class Moments(Command, frozen=True, kw_only=True, tag=True):
    """Answered with the inner optimizer's state, by leaf, encoded by msgpack."""


class Residual(Command, frozen=True, kw_only=True, tag=True):
    """Answered with the fragment's residual, as if no take were outstanding, like an
    anchor in full; empty without error feedback."""

    fragment: int


class End(Command, frozen=True, kw_only=True, tag=True):
    """The incarnation is not needed any more."""


AnyCommand = Setup | Begin | Step | Take | Adopt | Judge | Moments | Residual | End

decode = msgspec.msgpack.Decoder(AnyCommand).decode


class Worker:
    """A process like the recorded one; ends with the `with` block, or with us."""

    def __init__(self, run: RunConfig, recorded: Environment) -> None:
        self._connection, theirs = Pipe()
        number = theirs.fileno()
        self._process = start_child(
            [sys.executable, "-m", "diloco_jax.simulation.replay_worker", str(number)],
            {**island_environment(), **environment_like(recorded)},
            subprocess.DEVNULL,
            STDERR,
            pass_fds=(number,),
        )
        theirs.close()
        self.environment: Environment = msgspec.json.decode(self.ask(Setup(run=run)))

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()

    def send(self, command: AnyCommand) -> None:
        """Returns before it is carried out. Raises WorkerError."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(command))
        except OSError as error:
            raise self._ended() from error

    def ask(self, command: AnyCommand) -> bytes:
        """Waits for the answer. Raises WorkerError."""
        self.send(command)
        try:
            return self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def _ended(self) -> WorkerError:
        code = self._process.wait()
        return WorkerError(
            f"the process that repeats islands ended with code {code}; see above"
        )


class RemoteReplica:
    """The model copy of one incarnation, in a worker; also `boundary.Arrays`."""

    def __init__(self, worker: Worker, begin: Begin) -> None:
        self._worker, self._who = worker, begin.who
        worker.send(begin)

    def step(self, batch: npt.NDArray[np.int32], learning_rate: float) -> None:
        """One inner step on int32 [B, T + 1]."""
        octets = batch.astype("<i4").tobytes()
        self._send(Step, batch=octets, learning_rate=learning_rate)

    def take(self, fragment: int) -> bytes:
        """The fragment's encoded delta."""
        return self._worker.ask(Take(who=self._who, fragment=fragment))

    def moments(self) -> list[bytes]:
        """The inner optimizer's state, by leaf."""
        answer = self._worker.ask(Moments(who=self._who))
        return msgspec.msgpack.decode(answer, type=list[bytes])

    def residual(self, fragment: int) -> bytes:
        """The fragment's residual, as if no take were outstanding."""
        return self._worker.ask(Residual(who=self._who, fragment=fragment))

    def adopt(self, arrival: Arrival) -> None:
        """See Arrays; of each publish there is the payload."""
        self._send(
            Adopt,
            fragment=arrival.fragment,
            version=arrival.version,
            publishes=[payload for (payload,) in arrival.publishes],
        )

    def settle(self, fragment: int) -> None:
        """See Arrays."""
        self._send(Judge, fragment=fragment, outcome="settle")

    def reopen(self, fragment: int) -> None:
        """See Arrays."""
        self._send(Judge, fragment=fragment, outcome="reopen")

    def drop(self, fragment: int) -> None:
        """See Arrays."""
        self._send(Judge, fragment=fragment, outcome="drop")

    def reset(self, fragment: int) -> None:
        """See Arrays."""
        self._send(Judge, fragment=fragment, outcome="reset")

    def end(self) -> None:
        """It is not needed any more."""
        self._send(End)

    def _send(self, command: type[Any], **fields: Any) -> None:
        self._worker.send(command(who=self._who, **fields))
