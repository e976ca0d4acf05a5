"""Child processes that are restarted when they crash and never outlive the launcher.

A child leads a process group and a session of its own, so that Ctrl-C reaches the
launcher alone. On Linux the kernel kills it when the launcher dies, however that
happens. Its standard output and error are appended to one log.

Exit codes: 0 the child is done; 3 the peer refused it, 2 its arguments or config are
wrong: neither is cured by another attempt; anything else is a crash.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

logger = logging.getLogger(__name__)

State = Literal["running", "restarting", "done", "refused", "failed", "stopped"]

EXIT_CONFIG, EXIT_REFUSED = 2, 3
POLL_S = 0.05
TAIL_BYTES = 8192
GUARD = Path(__file__).with_name("guard.py")


class ManagedProcess:
    """One child, its restarts included. `poll()` must be called now and then.

    command: the child's command line for its n-th attempt (counted from 1, within
    this launcher); called just before each start. Start from the main thread only:
    the kernel ties the child's life to the thread that started it.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        log: Path,
        *,
        environment: Mapping[str, str],
        restarts: int,
        restart_delay_s: float,
        stop_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.name = name
        self.log = log
        self.state: State = "stopped"
        self.starts = 0
        self.reason = ""
        """Why it is not running, for people."""
        self.exit_code: int | None = None
        """Of the attempt that ended last; negative = the signal that ended it."""
        self._command = command
        self._environment = dict(environment)
        self._restarts = restarts
        self._restart_delay_s = restart_delay_s
        self._stop_s = stop_s
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._restart_at = 0.0
        self._kill_at = float("inf")

    @property
    def pid(self) -> int:
        """The child's process id; 0 if there is none."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Starts the child."""
        self.starts += 1
        command = self._command(self.starts)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = start_child(command, self._environment, log, log)
        self.state, self.reason = "running", ""
        logger.info("%s started as process %d", self.name, self._process.pid)

    def poll(self) -> State:
        """Looks after the child: reaps, restarts or kills it where that is due."""
        if self.state == "restarting" and self._clock() >= self._restart_at:
            self.start()
        if self._process is not None:
            code = self._process.poll()
            if code is not None:
                self._ended(code)
            elif self._clock() >= self._kill_at:
                logger.warning(
                    "%s did not end within %g s; killed", self.name, self._stop_s
                )
                kill_group(self._process)
        return self.state

    def stop(self) -> None:
        """Asks the child to end (SIGTERM); `poll` kills it after `stop_s`."""
        if self._process is not None and (code := self._process.poll()) is not None:
            self._ended(code)
        if self._process is None:
            if self.state == "restarting":
                self.state = "stopped"
        elif self._kill_at == float("inf"):
            self._kill_at = self._clock() + self._stop_s
            self._process.terminate()

    def kill(self) -> None:
        """Ends the child and its group at once, and waits until it is gone."""
        self.stop()
        if self._process is not None:
            kill_group(self._process)
            self._ended(self._process.wait(self._stop_s))

    def _ended(self, code: int) -> None:
        assert self._process is not None
        kill_group(self._process)  # whatever it may have started
        self._process, self.exit_code = None, code
        asked, self._kill_at = self._kill_at < float("inf"), float("inf")
        ended = f"was ended by {_signal_name(-code)}" if code < 0 else f"exited {code}"
        if code == 0:
            self.state = "done"
        elif code in (EXIT_REFUSED, EXIT_CONFIG):
            self.state = "refused" if code == EXIT_REFUSED else "failed"
            self.reason = _last_line(self.log) or ended
        elif asked:
            self.state, self.reason = "stopped", ended
        elif self.starts > self._restarts:
            self.state = "failed"
            self.reason = f"{ended} in attempt {self.starts}; no restart is left"
        else:
            self.state = "restarting"
            self.reason = f"{ended}; restarts in {self._restart_delay_s:g} s"
            self._restart_at = self._clock() + self._restart_delay_s
        logger.info("%s %s (%s)", self.name, self.state, self.reason or ended)


def wait_all(
    processes: Iterable[ManagedProcess],
    deadline_s: float,
    wait: Callable[[float], object],
) -> None:
    """Polls until no process runs or the deadline is over; then kills what is left."""
    processes = tuple(processes)
    deadline = time.monotonic() + deadline_s
    while any(p.poll() in ("running", "restarting") for p in processes):
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            return
        wait(POLL_S)


def start_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: BinaryIO | int,
    stderr: BinaryIO | int,
) -> subprocess.Popen[bytes]:
    """Starts a command that dies with this process, in a group of its own."""
    guard = [sys.executable, "-IS", str(GUARD), str(os.getpid())]
    return subprocess.Popen(
        [*guard, *command] if sys.platform == "linux" else command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to a child and whatever it started and left in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def log_tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log that hold anything, oldest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def _last_line(path: Path) -> str:
    return "".join(log_tail(path, 1))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
