"""Child processes that are restarted when they crash.

The unit is one process, or the hosts of one island, which start and end together: when
one host fails, the others are killed and all start again.

Standard output and error of a child are appended to one log.

The codes that end a child for good are in `exit_codes`; any other exit is a crash.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from diloco_jax.cluster.children import kill_group, start_child
from diloco_jax.errors import EXIT_CONFIG, EXIT_REFUSED
from diloco_jax.process import crashes_in_a_row

logger = logging.getLogger(__name__)

State = Literal["running", "restarting", "done", "refused", "failed", "stopped"]

POLL_S = 0.05
TAIL_BYTES = 8192
ERROR = "error: "
"""Beginning of the message with which `cli.main` ends a command."""


class ManagedProcess:
    """One child or several, restarts included. `poll()` must be called regularly.

    restarts: largest number in a row; see `diloco_jax.process`.

    commands: returns the children's command lines for their n-th attempt (from 1,
    within this launcher); called just before each start.
    log: log of the first child; the n-th other child writes to NAME.n.log beside it.
    """

    def __init__(
        self,
        name: str,
        commands: Callable[[int], Sequence[Sequence[str]]],
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
        """Reason, for people, why it is not running."""
        self.exit_code: int | None = None
        """Exit code of the latest ended attempt; negative = the signal that ended it.
        """
        self._commands = commands
        self._environment = dict(environment)
        self._restarts = restarts
        self._restart_delay_s = restart_delay_s
        self._stop_s = stop_s
        self._clock = clock
        self._processes: list[subprocess.Popen[bytes]] = []
        self._crashes, self._started_at = 0, 0.0
        self._restart_at = 0.0
        self._kill_at = float("inf")
        self._patience_s = stop_s

    @property
    def pids(self) -> list[int]:
        """Process ids of all children, in the order of their commands."""
        return [process.pid for process in self._processes]

    def start(self) -> None:
        """Start the children."""
        self.starts, self._started_at = self.starts + 1, self._clock()
        commands = self._commands(self.starts)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        for number, command in enumerate(commands):
            suffix = f".{number}.log" if number else ".log"
            with self.log.with_suffix(suffix).open("ab") as log:
                child = start_child(command, self._environment, log, log)
            self._processes.append(child)
        self.state, self.reason = "running", ""
        logger.info("%s started as process %s", self.name, self.pids)

    def poll(self) -> State:
        """Reap, restart or kill the children where that is due; return the state."""
        if self.state == "restarting" and self._clock() >= self._restart_at:
            self._restart()
        if self._processes:
            code = self._exit_code()
            if code is not None:
                self._ended(code)
            elif self._clock() >= self._kill_at:
                logger.warning(
                    "%s did not end within %g s; killed", self.name, self._patience_s
                )
                self._kill_groups()
        return self.state

    def _restart(self) -> None:
        """Start again. That the system has no room for a process, or for its log, is a
        crash too: it must not end the others."""
        try:
            self.start()
        except OSError as error:
            self._kill_groups()
            for process in self._processes:
                process.wait(self._stop_s)
            self._processes = []
            self._crashed(f"could not be started ({error})")
            logger.info("%s %s (%s)", self.name, self.state, self.reason)

    def stop(self, more_s: float = 0.0) -> None:
        """Ask the children to end (SIGTERM); `poll` kills them after `stop_s` plus
        `more_s`."""
        if self._is_to_end(more_s):
            for process in self._processes:
                process.terminate()

    def _is_to_end(self, more_s: float) -> bool:
        """Start no child any more; tell whether some run that nobody asked to end."""
        if self._processes and (code := self._exit_code()) is not None:
            self._ended(code)
        if not self._processes and self.state == "restarting":
            self.state = "stopped"
        if not self._processes or self._kill_at < float("inf"):
            return False
        self._patience_s = self._stop_s + more_s
        self._kill_at = self._clock() + self._patience_s
        return True

    def kill(self) -> None:
        """Kill the children and their groups, and wait until they are gone. They are
        not asked to end: what one did before it dies would be a matter of chance."""
        self._is_to_end(0.0)
        if self._processes:
            self._kill_groups()
            codes = [process.wait(self._stop_s) for process in self._processes]
            self._ended(next((code for code in codes if code), 0))

    def _exit_code(self) -> int | None:
        """Return 0 once all have ended well, the code of one that failed, or None."""
        codes = [process.poll() for process in self._processes]
        failed = [code for code in codes if code]
        # Codes that no attempt cures come before those that followed from them.
        for code in (EXIT_CONFIG, EXIT_REFUSED, *failed):
            if code in failed:
                return code
        return None if None in codes else 0

    def _kill_groups(self) -> None:
        for process in self._processes:
            kill_group(process)

    def _ended(self, code: int) -> None:
        self._kill_groups()  # The children may have started processes, too.
        for process in self._processes:
            process.wait(self._stop_s)
        self._processes, self.exit_code = [], code
        asked, self._kill_at = self._kill_at < float("inf"), float("inf")
        ended = f"was ended by {_signal_name(-code)}" if code < 0 else f"exited {code}"
        if code == 0:
            self.state = "done"
        elif code in (EXIT_CONFIG, EXIT_REFUSED):
            self.state = "refused" if code == EXIT_REFUSED else "failed"
            self.reason = _last_line(self.log) or ended
        elif asked:
            self.state, self.reason = "stopped", ended
        else:
            self._crashed(ended)
        logger.info("%s %s (%s)", self.name, self.state, self.reason or ended)

    def _crashed(self, ended: str) -> None:
        now = self._clock()
        self._crashes = crashes_in_a_row(self._crashes, now - self._started_at)
        if self._crashes > self._restarts:
            self.state = "failed"
            self.reason = f"{ended} in attempt {self.starts}; no restart is left"
        else:
            self.state = "restarting"
            self.reason = f"{ended}; restarts in {self._restart_delay_s:g} s"
            self._restart_at = now + self._restart_delay_s


def wait_all(
    processes: Iterable[ManagedProcess],
    deadline_s: float,
    wait: Callable[[float], object],
) -> None:
    """Poll until no process runs or the deadline is over; then kill the rest."""
    processes = tuple(processes)
    deadline = time.monotonic() + deadline_s
    while any(p.poll() in ("running", "restarting") for p in processes):
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            return
        wait(POLL_S)


def log_tail(path: Path, lines: int) -> list[str]:
    """Return the last non-empty lines of a log, oldest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def last_error(path: Path) -> str:
    """Return the last error message of a `diloco` command in its log; "" if none."""
    said = [line for line in log_tail(path, TAIL_BYTES) if line.startswith(ERROR)]
    return said[-1].removeprefix(ERROR) if said else ""


def _last_line(path: Path) -> str:
    return "".join(log_tail(path, 1))


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
