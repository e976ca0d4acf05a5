"""Where a worker's process runs, and how a lead comes to it: here, or elsewhere."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from diloco_jax.config import Config
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.coordinator.workers.rendezvous import Survivor
from diloco_jax.core.members import importable
from diloco_jax.machine import fit_threads
from diloco_jax.protocol.holding import BeginWorker, RestoreFragments
from diloco_jax.wire import addresses
from diloco_jax.wire.duplex import End

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "diloco_jax.coordinator.workers.process")


class Unreachable(Exception):  # noqa: N818
    """There is no worker at this place, and trying again does not help."""


class OpenLine(NamedTuple):
    """A connection to a worker's process."""

    end: End
    begin: BeginWorker
    """The first message to it."""
    left: bool
    """It may be a process of an earlier lead, which goes on only if it can."""


class Place(Protocol):
    """Where a worker runs. One thread calls `open`."""

    patience_s: float
    """Seconds for which `open` tries."""
    ends_with_line: bool
    """A process there does not outlive its line to this lead."""

    @property
    def pid(self) -> int:
        """The worker's process on this machine; 0: there is none."""

    def open(self, begin: BeginWorker, asked: RestoreFragments, new: bool) -> OpenLine:
        """Connect to a process; see `OpenLine`.

        Args:
          asked: what the process restores.
          new: only a new process will do.

        Raises Unreachable.
        """

    def silent_s(self) -> float:
        """Return the seconds since `open` last went on."""

    def address_of(self, bound: str) -> str:
        """Return the address at which islands dial a worker that serves at `bound`."""

    def end(self, *, kill: bool) -> None:
        """Wait for the end of the process; kill it first, or if it stays too long."""


class Here:
    """Processes of a worker on this machine, one after another."""

    patience_s = 0.0
    ends_with_line = True

    def __init__(self, workdir: Path, worker: int, stop_s: float) -> None:
        """workdir: where they say where they are. stop_s: time to end in."""
        self._workdir, self._worker, self._stop_s = workdir, worker, stop_s
        self._process: subprocess.Popen[bytes] | Survivor | None = None
        self.life = 0
        """Number of the present process in the run."""

    @property
    def pid(self) -> int:
        """See `Place`."""
        return self._process.pid if self._process is not None else 0

    def reach(self) -> End | None:
        """Connect to the process that an earlier lead has left; None: none."""
        reached = rendezvous.reach(self._workdir, self._worker)
        if reached is None:
            return None
        if self.pid != reached.process.pid:
            self._process = reached.process
        else:  # A child of this process, which has to be waited for as one.
            reached.process.close()
        self.life = rendezvous.last_life(self._workdir, self._worker)
        return reached.end

    def start(self) -> End:
        """Start a process, and connect to it. Raises OSError if there is no room."""
        environment = {**os.environ, **importable(), "JAX_PLATFORMS": "cpu"}
        fit_threads(environment)
        last = rendezvous.last_life(self._workdir, self._worker)
        self.life = 1 + max(self.life, last)
        own, other = socket.socketpair()
        with contextlib.ExitStack() as undo, other:
            undo.enter_context(own)
            self._process = subprocess.Popen(
                [*COMMAND, str(other.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(other.fileno(),),
                start_new_session=True,
            )
            undo.pop_all()
        return own

    def end(self, *, kill: bool) -> None:
        """See `Place`."""
        process = self._process
        if process is None:
            return
        if kill and process.poll() is None:
            process.kill()
        try:
            process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                process.wait(self._stop_s)
            except subprocess.TimeoutExpired:
                # In a call of the kernel, as when a disk hangs.
                logger.error(
                    "process %d of worker %d was killed and has not ended within %g s; "
                    "see the machine's disks",
                    process.pid,
                    self._worker,
                    self._stop_s,
                )


class BesideLead(Here):
    """The place of a worker on the lead's machine."""

    def __init__(self, begin: BeginWorker, config: Config) -> None:
        self._placement = config.placement
        stop_s = config.placement.deadlines.stop_s
        super().__init__(Path(begin.workdir), begin.worker, stop_s)

    def open(self, begin: BeginWorker, asked: RestoreFragments, new: bool) -> OpenLine:
        """See `Place`."""
        found = None if new else self.reach()
        end = found or self.start()
        return OpenLine(end, replace(begin, life=self.life), found is not None)

    def silent_s(self) -> float:
        """See `Place`."""
        return math.inf

    def address_of(self, bound: str) -> str:
        """See `Place`."""
        if not self._placement.advertise:
            return bound
        _, port = addresses.parse_address(bound)
        there, first = addresses.parse_address(self._placement.advertise)
        # Where ports are fixed, each is forwarded as the coordinator's own is.
        if own := addresses.parse_address(self._placement.bind)[1]:
            port += first - own
        return addresses.format_address(there, port)
