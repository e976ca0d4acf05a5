"""The place where a lead finds the workers that the lead before it has left behind.

A worker listens at a socket that its user alone reaches, and `WORKDIR/workers/N.json`
says where. A lead that is started again says `BeginWorker` there. Each lead of a run
has a number, larger than those before it; a worker believes the largest alone, and
breaks its line to any other. So no worker ever has two leads. It speaks to a lead as
soon as it hears it, though it may be minutes before it does what that says.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from diloco_jax import run_files
from diloco_jax.coordinator.workers.line import WorkerLine, read_frame, write_frame
from diloco_jax.files import write_json
from diloco_jax.protocol.holding import (
    BeginWorker,
    EndWorker,
    Obeyed,
    next_number,
    to_worker,
)

logger = logging.getLogger(__name__)

HAS_SURVIVORS = hasattr(os, "pidfd_open") and hasattr(socket, "SO_PEERCRED")
"""Whether this system lets a process watch, and end, one that it did not start."""
WORD_S = 5.0
"""Longest wait for the first word of a lead, or for a worker that was told to end."""
LOOK_S = 0.5
"""Interval between two looks at whether to wait for a lead any longer, in seconds."""
_LEAD, _SOCKET, _LIFE = "lead", "socket", "life"
_RUN, _DIAL = "run_id", "dial"
_CREDENTIALS = struct.Struct("3i")


class Survivor:
    """A process of an earlier lead. Its number cannot come to mean another process."""

    def __init__(self, pid: int) -> None:
        """Watch a process. Raises OSError if it has ended."""
        self.pid, self._descriptor = pid, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return None as long as it lives."""
        return 0 if self._ends(0.0) else None

    def kill(self) -> None:
        """End it at once."""
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> bool:
        """Signal it; return False if it has ended."""
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            return False
        return True

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        if not self._ends(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return 0

    def close(self) -> None:
        """Watch it no more."""
        os.close(self._descriptor)

    def _ends(self, within_s: float | None) -> bool:
        ends = select.poll()
        ends.register(self._descriptor, select.POLLIN)
        return bool(ends.poll(None if within_s is None else 1000 * within_s))


class Reached(NamedTuple):
    """A worker of an earlier lead, with a connection to it."""

    end: socket.socket
    process: Survivor


# ---- the lead's side ----------------------------------------------------------------


def next_lead(workdir: Path, at_least: int = 1) -> int:
    """Return the number of this lead, and keep it: no other may be started at the same
    time (`run_files.LOCK`)."""
    (workdir / run_files.WORKERS).mkdir(exist_ok=True)
    number = next_number(_number(_path(workdir, _LEAD), _LEAD), at_least)
    write_json({_LEAD: number}, _path(workdir, _LEAD))
    return number


def last_life(workdir: Path, worker: int) -> int:
    """Return the number of the last process of a worker in this run; 0: it had none."""
    return _number(_path(workdir, worker), _LIFE)


def are_left(workdir: Path) -> bool:
    """Tell whether workers of an earlier lead may be there."""
    places = (workdir / run_files.WORKERS).glob("*.json")
    return any(_read(path).get(_SOCKET) for path in places)


def reach(workdir: Path, worker: int) -> Reached | None:
    """Connect to the process of a worker that an earlier lead has left; None: none."""
    name = str(_read(_path(workdir, worker)).get(_SOCKET, ""))
    if not name or not HAS_SURVIVORS:
        return None
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(WORD_S)
    try:
        end.connect(name)
        found = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(found)
        if uid != os.getuid():
            raise PermissionError(f"{name} is of user {uid}")
        return Reached(end, Survivor(pid))
    except OSError as error:
        logger.debug("worker %d of an earlier lead is gone: %s", worker, error)
        end.close()
        return None


def process_of(workdir: Path, worker: int) -> Survivor | None:
    """Return the process of a worker of this machine; None if there is none."""
    if (reached := reach(workdir, worker)) is None:
        return None
    reached.end.close()
    return reached.process


def end_others(workdir: Path, count: int) -> None:
    """End the workers that an earlier lead has left, but for the first `count`."""
    for path in (workdir / run_files.WORKERS).glob("*.json"):
        if not path.stem.isdecimal() or int(path.stem) < count:
            continue
        if (reached := reach(workdir, int(path.stem))) is not None:
            with contextlib.suppress(OSError):
                write_frame(reached.end, EndWorker())
            try:
                reached.process.wait(WORD_S)
            except subprocess.TimeoutExpired:
                reached.process.kill()
                reached.process.wait(WORD_S)
            reached.end.close()
        path.unlink(missing_ok=True)


# ---- the worker's side --------------------------------------------------------------


def obeyed(workdir: Path) -> Obeyed:
    """Return which lead the worker of this workdir, on another machine than the lead,
    obeyed last."""
    found = _path(workdir, _LEAD)
    run_id = _read(found).get(_RUN, "")
    return Obeyed(str(run_id), _number(found, _LEAD), _number(found, _DIAL))


def obey(workdir: Path, now: Obeyed) -> None:
    """Keep what `obeyed` returns."""
    (workdir / run_files.WORKERS).mkdir(exist_ok=True)
    kept = {_RUN: now.run_id, _LEAD: now.lead, _DIAL: now.dial}
    write_json(kept, _path(workdir, _LEAD))


class Came(NamedTuple):
    """A newer lead."""

    line: WorkerLine
    begin: BeginWorker


class Rendezvous:
    """A worker's place; its thread hears leads for as long as the process lives."""

    def __init__(
        self,
        begin: BeginWorker,
        line: WorkerLine,
        speak: Callable[[socket.socket], WorkerLine],
        ended: Callable[[], None],
    ) -> None:
        """Listen, and write down where.

        Args:
          begin: the first message of the present lead.
          line: the line to it. It breaks as a newer lead comes.
          speak: makes the line to a newer lead, at once: a lead does not wait for a
            worker that is silent, and this one may be busy for minutes.
          ended: called if a lead that needs no workers comes.
        """
        self._workdir = Path(begin.workdir)
        self._path = _path(self._workdir, begin.worker)
        self._begin, self._lead, self._dial = begin, begin.lead, begin.dial
        self._newest, self._speak, self._ended = line, speak, ended
        self._came: Came | None = None
        """The newest lead, until it is taken."""
        self._changed = threading.Condition()
        _remove_place(_read(self._path))
        # The name of a socket is short, and a workdir's may be long.
        self._folder = Path(tempfile.mkdtemp(prefix="diloco-"))
        name = self._folder / "worker"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(name))
        self._listener.listen(4)
        write_json({_SOCKET: str(name), _LIFE: begin.life}, self._path)
        self._hearing = threading.Thread(target=self._hear, daemon=True)
        self._hearing.start()

    def await_lead(self, within_s: float) -> Came | None:
        """Wait for a newer lead; None if there is none in time, or one that does not
        come here, or no run any more."""
        deadline, passed_by = time.monotonic() + within_s, 0.0
        while time.monotonic() < deadline and self._workdir.is_dir():
            if (came := self._taken(LOOK_S)) is not None:
                return came
            if _number(_path(self._workdir, _LEAD), _LEAD) > self._lead:
                passed_by += LOOK_S
                if passed_by > WORD_S:
                    return None
        return None

    def close(self) -> None:
        """Leave the place. The number of this life stays, for the next one."""
        with contextlib.suppress(OSError):  # Wakes the thread.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._hearing.join(WORD_S)
        self._listener.close()
        if (came := self._taken(0.0)) is not None:
            came.line.close()
        if self._workdir.is_dir():
            write_json({_LIFE: self._begin.life}, self._path)
        _remove_place({_SOCKET: str(self._folder / "worker")})

    def _hear(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            end.settimeout(WORD_S)
            try:
                frame = read_frame(end)
                word = to_worker(frame) if frame is not None else None
            except msgspec.DecodeError:
                word = None
            match word:
                case BeginWorker() if self._is_newer(word):
                    self._meet(end, word)
                case EndWorker():
                    self._ended()
                    end.close()
                case _:
                    end.close()

    def _meet(self, end: socket.socket, begin: BeginWorker) -> None:
        """Leave the leads before, also one that was not taken yet."""
        self._lead, self._dial = begin.lead, begin.dial
        with self._changed:
            self._newest.part()
            passed_over = self._came
            self._newest = self._speak(end)
            self._came = Came(self._newest, begin)
            self._changed.notify()
        if passed_over is not None:
            passed_over.line.close()

    def _taken(self, within_s: float) -> Came | None:
        with self._changed:
            self._changed.wait_for(lambda: self._came is not None, within_s)
            came, self._came = self._came, None
            return came

    def _is_newer(self, begin: BeginWorker) -> bool:
        own = self._begin
        same = (begin.run_id, begin.worker) == (own.run_id, own.worker)
        return same and begin.is_newer(self._lead, self._dial)


def _path(workdir: Path, name: int | str) -> Path:
    return workdir / run_files.WORKERS / f"{name}.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _number(path: Path, field: str) -> int:
    found = _read(path).get(field)
    return found if isinstance(found, int) else 0


def _remove_place(written: dict[str, Any]) -> None:
    """Remove the socket of a process that has ended, and its folder."""
    if name := str(written.get(_SOCKET, "")):
        with contextlib.suppress(OSError):
            Path(name).unlink()
            Path(name).parent.rmdir()
