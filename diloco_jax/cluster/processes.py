"""Child processes that are restarted when they crash, and never outlive their launcher.

The unit is one process, or the hosts of one island, which start and end together: when
one host fails, the others are killed and all start again. The codes that end a child
for good are in `diloco_jax/errors.py`; any other exit is a crash. Standard output and
error of a child are appended to one log. Counts of an island's starts number its
incarnations across crashes.

A child leads a process group and a session of its own, so that Ctrl-C reaches the
launcher alone. On Linux the kernel kills it when the launcher dies, however that
happens. To the kernel the launcher is the thread that started the child, so one thread,
which lasts as long as the process, starts them all.

A local run is closed to other users of its machine, though loopback is open to all of
them: its processes prove by keys of the run's own who they are, as processes on several
machines do. Only the owner reads these keys and the other files of the run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, BinaryIO, Literal

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError, Placement
from diloco_jax.core.members import importable
from diloco_jax.errors import EXIT_CONFIG, EXIT_REFUSED
from diloco_jax.files import write_json
from diloco_jax.process import crashes_in_a_row
from diloco_jax.wire import addresses
from diloco_jax.wire.certificates import CA_DAYS, add, make_certificates, principals
from diloco_jax.wire.peers import island
from diloco_jax.workdir import held

logger = logging.getLogger(__name__)

GUARD = Path(__file__).with_name("guard.py")

_Asked = tuple["Future[Any]", Sequence[str], dict[str, Any]]
_asked: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
_starting = threading.Lock()
_starter: threading.Thread | None = None


def start_child(
    command: Sequence[str],
    environment: Mapping[str, str],
    stdout: BinaryIO | int,
    stderr: BinaryIO | int,
    *,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a command that dies with this process, in a group of its own.

    pass_fds: open files that the child inherits under their numbers.
    """
    guard = [sys.executable, "-IS", str(GUARD), str(os.getpid())]
    settings = {
        "stdin": subprocess.DEVNULL,
        "stdout": stdout,
        "stderr": stderr,
        "env": {**os.environ, **importable(), **environment},
        "start_new_session": True,
        "pass_fds": pass_fds,
    }
    _require_starter()
    made: Future[Any] = Future()
    whole = [*guard, *command] if sys.platform == "linux" else command
    _asked.put((made, whole, settings))
    process: subprocess.Popen[bytes] = made.result()
    return process


def _require_starter() -> None:
    """Have the thread that starts children. A fork of this process is without it."""
    global _starter
    with _starting:
        if _starter is None or not _starter.is_alive():
            # Not joined at exit, which would end the children first.
            _starter = threading.Thread(target=_start, daemon=True)
            _starter.start()


def _start() -> None:
    while True:
        made, command, settings = _asked.get()
        try:
            made.set_result(subprocess.Popen(command, **settings))
        except BaseException as error:
            made.set_exception(error)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to a child and to all processes in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def noted(workdir: Path) -> dict[str, list[int]]:
    """Return the process ids of a local run by name, as its launcher noted them last:
    those of an island in the order of its hosts. Nothing if none was started."""
    try:
        found = json.loads((workdir / run_files.PROCESSES).read_bytes())
    except OSError:
        return {}
    return {str(name): [int(pid) for pid in pids] for name, pids in found.items()}


def signal_group(pid: int, number: int) -> bool:
    """Signal a child of a launcher and its group, or with 0 only look for it; return
    whether it is there."""
    with contextlib.suppress(ProcessLookupError):
        # The launcher made it the leader of its group.
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
            return True
    return False


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
        """Start again. That the system has no room for a process, its log or its port
        is a crash too: it must not end the others."""
        try:
            self.start()
        except (OSError, ConfigError) as error:
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
            self.reason = "".join(log_tail(self.log, 1)) or ended
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


def quoted(path: Path) -> str:
    """Return the end of a log, for a message."""
    tail = "\n".join(f"  {line}" for line in log_tail(path, 15))
    return f"{path}:\n{tail or '  (empty)'}"


def last_error(path: Path) -> str:
    """Return the last error message of a `diloco` command in its log; "" if none."""
    said = [line for line in log_tail(path, TAIL_BYTES) if line.startswith(ERROR)]
    return said[-1].removeprefix(ERROR) if said else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


OTHERS = 0o077
"""Permissions of everybody but the owner."""


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Have this process and those that it starts make files for the owner alone."""
    before = os.umask(OTHERS)
    os.umask(before | OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def with_keys(config: Config, workdir: Path) -> Config:
    """Return the config of a local run with the keys in its workdir, which are made if
    they are missing.

    A run with certificates of its config, or with `placement.insecure`, has none. Those
    that it had before it was stopped are put aside.
    """
    placement, folder = config.placement, workdir / run_files.KEYS
    host, _ = addresses.parse_address(placement.bind)
    own = are_own(placement, workdir)
    foreign = placement.certificates and not own
    if foreign or placement.insecure or not addresses.is_loopback(host):
        if not own and folder.exists():
            folder.rename(folder.with_name(f"{folder.name}.{time.time_ns()}"))
        return config
    names = (*config.islands, *placement.admit)
    if not folder.exists():
        scratch = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(mode=0o700)
        make_certificates(scratch, [], CA_DAYS, islands=names)
        scratch.rename(folder)
    here = principals(folder)
    if missing := [name for name in names if island(name) not in here]:
        add(folder, [], CA_DAYS, islands=missing)
    return dataclasses.replace(config, placement=with_own_keys(placement, workdir))


def are_own(placement: Placement, workdir: Path) -> bool:
    """Tell whether the placement names the keys in the workdir of a local run, as a
    config that was copied from there does."""
    folder = workdir / run_files.KEYS
    given = placement.certificates
    return bool(given) and Path(given).resolve() == folder.resolve()


def with_own_keys(placement: Placement, workdir: Path) -> Placement:
    """Return the placement with the keys in the workdir of a local run, if it names no
    certificates and there are such keys."""
    folder = workdir / run_files.KEYS
    if placement.certificates or not folder.is_dir():
        return placement
    return dataclasses.replace(placement, certificates=str(folder))


HELD_S = 60.0
"""Seconds to wait for another island's count; a slow disk takes less."""


def next_attempt(path: Path, name: str) -> int:
    """Count one more attempt of the island in this file, `WORKDIR/attempts.json`.

    Counts begin at 1 and are on disk before they are returned. Several processes may
    count at the same time."""
    lock = path.with_name(run_files.ATTEMPTS_LOCK)
    with held(lock, "another island that starts", HELD_S):
        counts = _read(path)
        counts[name] = counts.get(name, 0) + 1
        write_json(counts, path)
    return counts[name]


def _read(path: Path) -> dict[str, int]:
    if not path.exists():
        return {}
    try:
        counts = json.loads(path.read_bytes())
        return {str(name): int(count) for name, count in counts.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a JSON object of attempts by island ({error}); "
            f"restore it, or give each island's next attempt as --incarnation"
        ) from error
