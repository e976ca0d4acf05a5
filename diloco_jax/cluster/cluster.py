"""The processes of one run: start them by their commands, look after them, stop them.

The dashboard beside a local run is one of them, and ends with the run.

`LocalCluster` is `diloco run` from Python: real processes to watch, kill and pause.

    with LocalCluster(config) as cluster:
        cluster.until(lambda status: status["merges"] > 10, timeout_s=120)
        cluster.islands["v5p-a"].kill()
        summary = cluster.wait(timeout_s=600)

Its processes are children of a separate `diloco run`, which restarts those that crash.
They end with it, and it ends with the process that has the `LocalCluster`, however that
happens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from diloco_jax import before_jax, run_files
from diloco_jax.cluster.processes import (
    POLL_S,
    ManagedProcess,
    kill_group,
    last_error,
    next_attempt,
    noted,
    private_files,
    quoted,
    signal_group,
    start_child,
    wait_all,
)
from diloco_jax.cluster.status import read_status
from diloco_jax.compilation import VARIABLE, of_run, of_user
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.config import require_files
from diloco_jax.errors import EXIT_CONFIG
from diloco_jax.files import absolute, write_json
from diloco_jax.process import Interrupt
from diloco_jax.wire import addresses
from diloco_jax.wire.errors import WireError
from diloco_jax.workdir import has_begun

DILOCO = (sys.executable, "-P", "-m", "diloco_jax.cli")
"""The command, in whose process no file of the current folder replaces a module."""
ALLOCATOR = {
    "GLIBC_TUNABLES": (
        "glibc.malloc.hugetlb=1"
        ":glibc.malloc.mmap_threshold=33554432"
        ":glibc.malloc.trim_threshold=268435456"
    )
}
"""Settings of the allocator: huge pages, and up to 256 MiB of freed memory are kept.
XLA allocates its temporaries, and gRPC its messages, anew every time. Page faults cost
more than the arithmetic of a merge, a third of a step and a sixth of a transfer."""

_given: deque[int] = deque(maxlen=128)
"""Ports that `free_port` gave lately: not in use yet, perhaps, and not free."""


def coordinator_command(workdir: Path, bind: str, *how: str) -> list[str]:
    """Return the `diloco coordinator` command for the run in `workdir`.

    how: `--init` or `--resume` for the first start, nothing for later ones."""
    command = [*DILOCO, "coordinator", str(workdir / run_files.CONFIG)]
    command += ["--workdir", str(workdir), "--bind", bind, *_keys(workdir)]
    return [*command, *how]


def island_commands(
    workdir: Path, name: str, hosts: int, coordinator: str, incarnation: int
) -> list[list[str]]:
    """Return the `diloco island` commands of one attempt, one for each host."""
    command = [*DILOCO, "island", str(workdir / run_files.CONFIG), "--name", name]
    command += ["--coordinator", coordinator, "--workdir", str(workdir)]
    command += ["--incarnation", str(incarnation), *_keys(workdir)]
    # Of the user, whose processes alone read it; without a home, that of the run.
    command += ["--cache", str(of_user() or of_run(workdir))]
    if hosts == 1:
        return [command]
    world = ["--world", f"127.0.0.1:{free_port()}"]
    return [[*command, *world, "--host-index", str(n)] for n in range(hosts)]


def _keys(workdir: Path) -> list[str]:
    """Return the option that gives a child the keys of the run, if it has some."""
    folder = workdir / run_files.KEYS
    return ["--certificates", str(folder)] if folder.is_dir() else []


def free_port() -> int:
    """Return a free port of this machine, the one after it free, too, both out of reach
    of outgoing connections and neither given lately. If another program takes it before
    its use, the attempt fails and the next one asks again."""
    while True:
        address, beside = addresses.reserve("127.0.0.1:0")
        beside.close()
        port = addresses.parse_address(address)[1]
        if port not in _given and port + 1 not in _given:
            _given.extend((port, port + 1))
            return port


def eval_command(workdir: Path) -> list[str]:
    """Return the `diloco eval` command for a finished run."""
    return [*DILOCO, "eval", str(workdir)]


def coordinator_environment() -> dict[str, str]:
    """Return the coordinator's additions to this process's environment. Without a home,
    it has the cache of the run."""
    cache = of_user()
    named = {} if cache is None else {VARIABLE: str(cache)}
    return {**named, **ALLOCATOR, "JAX_PLATFORMS": "cpu"}


def island_environment() -> dict[str, str]:
    """Return an island's additions to this process's environment.

    Islands on one machine compute on its CPU, unless JAX_PLATFORMS says otherwise.
    Raises ConfigError if jax cannot have its platform or flags here.
    """
    before_jax.require_platforms()
    before_jax.require_flags()
    platforms = os.environ.get("JAX_PLATFORMS") or "cpu"
    return {**ALLOCATOR, "JAX_PLATFORMS": platforms}


ALIVE = ("running", "restarting")


Route = Callable[[Path, str, str], str]
"""Returns the address that an island is given, from the workdir, the island's name and
the coordinator's address."""


def straight(workdir: Path, name: str, address: str) -> str:
    """Return the coordinator's own address."""
    return address


class ClusterError(Exception):
    """A run cannot start or go on; tells the process, why, and the end of its log."""

    def __init__(self, process: ManagedProcess, what: str, exit_code: int = 1):
        super().__init__(
            f"{process.name} {what}{': ' if process.reason else ''}{process.reason}"
            f"\n{quoted(process.log)}"
        )
        self.exit_code = exit_code


class Cluster:
    """Coordinator and islands. Call everything from the main thread."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        *,
        resume: bool = False,
        route: Route = straight,
    ):
        """resume: the workdir holds a run that was stopped."""
        self._route = route
        self.config = config
        self.workdir = workdir
        self._first = "--resume" if resume else "--init"
        self.address = ""
        """Address at which islands reach the coordinator; empty before it is up."""
        self._noted: dict[str, list[int]] = {}
        self._deadlines = config.placement.deadlines
        self.coordinator = self._managed(
            "coordinator", self._coordinator_command, coordinator_environment()
        )
        self.islands: dict[str, ManagedProcess] = {}
        self._step_seconds = max(i.step_seconds for i in config.islands.values())
        """Seconds per step of the slowest island, as far as known."""

    def start(
        self, interrupt: Interrupt, waiting: Callable[[Path], None] = lambda log: None
    ) -> None:
        """Start the coordinator and, once it has an address, the islands. waiting:
        called with the coordinator's log, again and again until then.

        Raises ConfigError as the coordinator does, and ClusterError if the coordinator
        ends or has no address after `compile_budget_s`. Returns early, without islands,
        if interrupted, or if the coordinator finds that the run is over.
        """
        self.coordinator.start()
        deadline = time.monotonic() + self.config.placement.compile_budget_s
        while not (address := self._read_address()):
            if interrupt.count:
                return
            state = self.coordinator.poll()
            if state == "done":
                return
            if state != "running":
                code = self.coordinator.exit_code
                if code == EXIT_CONFIG and (said := last_error(self.coordinator.log)):
                    raise ConfigError(said)
                raise ClusterError(
                    self.coordinator, "did not start", code if code in (2, 3) else 1
                )
            if time.monotonic() > deadline:
                raise ClusterError(
                    self.coordinator,
                    f"wrote no {run_files.ADDRESS} within placement.compile_budget_s = "
                    f"{self.config.placement.compile_budget_s:g} s",
                )
            waiting(self.coordinator.log)
            interrupt.wait(POLL_S)
        self.address = address
        for name in self.config.islands:
            commands = functools.partial(self._island_commands, name)
            self.islands[name] = self._managed(name, commands, island_environment())
            self.islands[name].start()

    def poll(self) -> bool:
        """Poll all processes; return False once the coordinator neither runs nor will
        again."""
        for island in self.islands.values():
            island.poll()
        state = self.coordinator.poll()
        managed = {"coordinator": self.coordinator, **self.islands}
        pids = {name: process.pids for name, process in managed.items()}
        if pids != self._noted:
            with contextlib.suppress(OSError):  # Full: it tries again.
                write_json(pids, self.workdir / run_files.PROCESSES)
                self._noted = pids
        return state in ALIVE

    @property
    def done(self) -> bool:
        """Whether the coordinator has ended well."""
        return self.coordinator.state == "done"

    def alone(self) -> bool:
        """Return True if no island runs or will run again."""
        return not any(p.state in ALIVE for p in self.islands.values())

    def stop(self, interrupt: Interrupt) -> None:
        """End the islands, which say goodbye, then the coordinator, which sums up.
        After the end of a run islands end by themselves, the hosts of one island
        together; a signal then would cut a host off.

        This takes at most three times `stop_s` and two steps of the slowest island,
        which ends at a boundary. A further signal ends everything at once.
        """
        asked = interrupt.count
        deadline = time.monotonic() + self._deadlines.stop_s
        while (
            self.done
            and any(i.state == "running" == i.poll() for i in self.islands.values())
            and time.monotonic() < deadline
            and interrupt.count == asked
        ):
            interrupt.wait(POLL_S)
        for group, more_s in (
            (tuple(self.islands.values()), 2 * self._step_seconds),
            ((self.coordinator,), 0.0),
        ):
            for process in group:
                process.stop(more_s)

            def wait(seconds: float) -> None:
                interrupt.wait(seconds)
                if interrupt.count > asked:
                    self.kill()

            wait_all(group, self._deadlines.stop_s + more_s + 1, wait)

    def kill(self) -> None:
        """End all processes now."""
        for process in (*self.islands.values(), self.coordinator):
            process.kill()

    def observe(self, status: Mapping[str, Any]) -> None:
        """Note from a status how long steps take."""
        known = status.get("islands", {}).values()
        steps = (island.get("median_step_seconds", 0.0) for island in known)
        self._step_seconds = max(self._step_seconds, *steps, 0.0)

    def overlay(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Return the coordinator's status plus the launcher's facts on processes."""
        known = status.get("islands", {})
        islands = {name: {"state": "starting"} for name in self.islands}
        islands |= {name: dict(island) for name, island in known.items()}
        for name, process in self.islands.items():
            if process.state in ("restarting", "refused", "failed"):
                islands[name]["state"] = process.state
                continue
            begins = process.state == status.get("phase") == "running"
            if begins and islands[name]["state"] == "gone":
                islands[name]["state"] = "starting"  # Its next life says hello soon.
        return {**status, "islands": islands}

    def _coordinator_command(self, start: int) -> list[list[str]]:
        bind = self.config.placement.bind
        if bind.endswith(":0") and self.address:
            # The same port again: islands know no other.
            bind = bind.removesuffix("0") + self.address.rpartition(":")[2]
        first = start == 1 or not has_begun(self.workdir)
        how = (self._first,) if first else ()
        return [coordinator_command(self.workdir, bind, *how)]

    def _island_commands(self, name: str, start: int) -> list[list[str]]:
        hosts = self.config.islands[name].hosts
        address = self._route(self.workdir, name, self.address)
        attempt = next_attempt(self.workdir / run_files.ATTEMPTS, name)
        return island_commands(self.workdir, name, hosts, address, attempt)

    def _read_address(self) -> str:
        try:
            return (self.workdir / run_files.ADDRESS).read_text().strip()
        except OSError:
            return ""

    def _managed(
        self,
        name: str,
        command: Callable[[int], list[list[str]]],
        environment: Mapping[str, str],
    ) -> ManagedProcess:
        return ManagedProcess(
            name,
            command,
            self.workdir / run_files.LOGS / f"{name}.log",
            environment=environment,
            restarts=self.config.placement.restarts,
            restart_delay_s=self.config.placement.restart_delay_s,
            stop_s=self._deadlines.stop_s,
        )


END_S = 5.0
SEEN_S = 3.0
"""Seconds for which the page is still served after the run's end: those who watch it
see how it ended (it asks every two seconds)."""


@contextlib.contextmanager
def dashboard(workdir: Path, console: Console) -> Iterator[None]:
    """Serve the page of a run while the block runs; say where.

    It is not restarted: no run depends on it, and its log tells why it ended."""
    port = free_port()
    log = workdir / run_files.LOGS / "dashboard.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        command = [*DILOCO, "dashboard", str(workdir), "--port", str(port)]
        child = start_child(command, {}, output, output)
    console.print(f"dashboard: http://localhost:{port}", highlight=False)
    try:
        yield
        time.sleep(SEEN_S)
    finally:
        kill_group(child)
        child.wait(END_S)


# ---- `diloco run` from Python ------------------------------------------------------

ASK_S = 0.2


class LocalClusterError(RuntimeError):
    """The run did not reach the awaited state: names it, and quotes the log's end."""


@dataclasses.dataclass(frozen=True)
class LocalProcess:
    """The coordinator, or an island with all its hosts. Signals go to the current
    process; after a restart, to the new one."""

    name: str
    workdir: Path

    @property
    def pids(self) -> list[int]:
        """Process ids in the order of hosts; empty while it is not running."""
        return noted(self.workdir).get(self.name, [])

    def kill(self, host: int = 0) -> None:
        """Send SIGKILL, as when a machine is lost."""
        self._signal(signal.SIGKILL, host)

    def pause(self, host: int = 0) -> None:
        """Send SIGSTOP, as when a machine hangs."""
        self._signal(signal.SIGSTOP, host)

    def resume(self, host: int = 0) -> None:
        """Send SIGCONT, after `pause`."""
        self._signal(signal.SIGCONT, host)

    def _signal(self, number: int, host: int) -> None:
        pids = self.pids
        if host >= len(pids) or not signal_group(pids[host], number):
            raise LocalClusterError(
                f"{self.name} has no process for host {host}: it has {len(pids)} now"
            )


class LocalCluster:
    """One run of a config on this machine, in a folder of its own.

    Use it as a context manager: its processes start with the block, and all of them
    end with it. docs/python.md has an example that a test runs.

    Attributes:
      coordinator, islands: handles on the processes, the islands' by name: `pids`,
        `kill()`, `pause()`, `resume()`.
      workdir: folder of the run, for `read_history` and `load_params`.
      log: what `diloco run` said.
    """

    def __init__(
        self,
        config: Config,
        workdir: str | Path | None = None,
        launcher: Sequence[str] = ("run",),
    ) -> None:
        """workdir: folder that stays afterwards; None = a temporary one, removed at the
        end. launcher: `diloco run`, or `diloco chaos`, and its options. Raises
        ConfigError if the config cannot run."""
        self.config = config.validate()
        require_files(config.run)
        self._temporary = None
        if workdir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="diloco-")
            workdir = self._temporary.name
        self.workdir = Path(absolute(str(workdir))) / "run"
        self.log = self.workdir.with_name("diloco.log")
        self.coordinator = LocalProcess("coordinator", self.workdir)
        self.islands = {
            name: LocalProcess(name, self.workdir) for name in config.islands
        }
        self._command = tuple(launcher)
        self._launcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the launcher, which starts everything; return at once. Raise
        ConfigError if the folder is that of a run, or has one."""
        path = self.log.with_name(run_files.CONFIG)
        signs = run_files.SIGNS_OF_A_RUN
        of_run = [self.workdir / sign for sign in signs]
        of_run += [path.with_name(s) for s in signs if s != path.name]
        if there := [file for file in of_run if file.exists()]:
            raise ConfigError(
                f"workdir {path.parent} holds a run already ({there[0]}); give another"
            )
        name, *options = self._command
        command = [*DILOCO, name, str(path), "--workdir", str(self.workdir), *options]
        with private_files():
            self.log.parent.mkdir(parents=True, exist_ok=True)
            write_json(dataclasses.asdict(self.config), path)
            with self.log.open("wb") as log:
                self._launcher = start_child(command, {}, log, log)

    def status(self) -> dict[str, Any]:
        """Return the status as `diloco status` does. Before the coordinator is up, and
        while it is away, it has only `phase`, "starting" or "unreachable", `islands`,
        which is empty, and `merges`, which is 0."""
        try:
            return read_status(str(self.workdir), self.config.placement)
        except ConfigError:
            return {"phase": "starting", "islands": {}, "merges": 0}
        except WireError:
            return {"phase": "unreachable", "islands": {}, "merges": 0}

    def until(
        self, holds: Callable[[dict[str, Any]], bool], timeout_s: float
    ) -> dict[str, Any]:
        """Wait for the first status that meets the condition, and return it.

        Raises LocalClusterError if the run ends before that, or after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not holds(status := self.status()):
            if self.ended:
                raise self.error("ended before it met the condition", status)
            if time.monotonic() >= deadline:
                raise self.error(
                    f"did not meet the condition in {timeout_s:g} s", status
                )
            time.sleep(ASK_S)
        return status

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """Wait until the run is done and evaluated; return its summary.

        Raises LocalClusterError if the run fails, or after `timeout_s`.
        """
        assert self._launcher is not None, "start it first"
        try:
            code = self._launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.error(f"was not done in {timeout_s:g} s", {}) from None
        if code:
            raise self.error(f"ended with exit code {code}", {})
        return dict(json.loads((self.workdir / run_files.SUMMARY).read_bytes()))

    def close(self) -> None:
        """End every process; remove the folder if it is a temporary one."""
        if self._launcher is not None and not self.ended:
            self._launcher.terminate()
            step_s = self._longest_step()
            try:
                # Islands say goodbye, then the coordinator sums up (`Cluster.stop`).
                stop_s = self.config.placement.deadlines.stop_s
                self._launcher.wait(4 * stop_s + 2 * step_s)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()
        if self._temporary is not None:
            self._temporary.cleanup()

    def _longest_step(self) -> float:
        """Return the seconds of the slowest island's steps, as far as that is known: an
        island that offers its anchors has none yet."""
        seen = self.status()["islands"].values()
        steps = [island.step_seconds for island in self.config.islands.values()]
        steps += [float(one.get("median_step_seconds", 0.0)) for one in seen]
        return max(steps)

    @property
    def ended(self) -> bool:
        """Whether the launcher does not run, or not any more."""
        return self._launcher is None or self._launcher.poll() is not None

    def error(self, what: str, status: dict[str, Any]) -> LocalClusterError:
        """Return the error of a run of which that is to be told."""
        phase = f" (phase {status['phase']})" if "phase" in status else ""
        return LocalClusterError(f"the run {what}{phase}; {quoted(self.log)}")
