"""Replicas under torchft, their lighthouse and a supervisor that starts them again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.peers.torchft_books import books_of, forgotten_at
from benchmarks.peers.work import (
    RESTART_S,
    Outcome,
    Work,
    longest_gap,
    useful_tokens,
)

START_S = 120.0
"""Seconds within which all replicas have to make a step."""
POLL_S = 0.1
REPLICA = Path(__file__).with_name("torchft_replica.py")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a user of torchft."""

    name: str
    heartbeat_timeout_ms: int = 5000
    """torchft's own default; the others are those of its examples."""
    join_timeout_ms: int = 10_000
    timeout_s: float = 10.0
    quorum_retries: int = 0


EXAMPLES = Settings(name="torchft, as in its examples")
PATIENT = Settings(
    name="torchft, tuned", heartbeat_timeout_ms=1000, quorum_retries=1000
)


def run(work: Work, settings: Settings, venv: Path, folder: Path) -> Outcome:
    """Run the work; files go into the folder. Raises RuntimeError if not all begin."""
    group = _Group(work, settings, venv, folder)
    try:
        began = group.begin()
        group.train(began)
    finally:
        group.close()
    return _outcome(work, settings, group, began)


class _Group:
    """The processes of one run."""

    def __init__(
        self, work: Work, settings: Settings, venv: Path, folder: Path
    ) -> None:
        self._work, self._settings = work, settings
        self._venv, self._folder = venv, folder
        self._until = time.time() + START_S + 4 * work.seconds
        self._port = _free_port()
        self._replicas: dict[str, subprocess.Popen[bytes]] = {}
        self._due: dict[str, float] = {}
        self._lighthouse: subprocess.Popen[bytes] | None = None
        self.ended = 0
        self.restarted: set[str] = set()

    def begin(self) -> float:
        """Start everything; return the time at which all had committed a round."""
        self._start_lighthouse()
        for name in self._work.names:
            self._start(name)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            logs = [self.log(name) for name in self._work.names]
            firsts = [
                next((x["time"] for x in log if x.get("committed")), 0.0)
                for log in logs
            ]
            if all(firsts):
                return max(firsts)
            if gone := [n for n, p in self._replicas.items() if p.poll() is not None]:
                raise RuntimeError(f"{gone[0]} ended before it trained: {self.tail()}")
            time.sleep(POLL_S)
        raise RuntimeError(f"not all trained within {START_S:g} s: {self.tail()}")

    def train(self, began: float) -> None:
        """Wait until the time is over, strike, and start again what has ended."""
        work, struck, back = self._work, False, 0.0
        victim = self._replicas[work.victim]
        while time.time() < began + work.seconds:
            steps = sum(x["kind"] == "step" for x in self.log(work.names[0]))
            if not struck and steps >= work.fault_step:
                struck = True
                if work.scenario == "killed":
                    victim.kill()
                elif work.scenario == "coordinator lost" and self._lighthouse:
                    self._lighthouse.kill()
                    self._lighthouse.wait()
                    back = time.monotonic() + work.outage_s
            if back and time.monotonic() >= back:
                back = 0.0
                self._start_lighthouse()
            self._supervise(victim)
            time.sleep(POLL_S)

    def _supervise(self, victim: subprocess.Popen[bytes]) -> None:
        for name, process in self._replicas.items():
            if process.poll() is None:
                continue
            if name not in self._due:
                self._due[name] = time.monotonic() + RESTART_S
                if process is not victim or self._work.scenario != "killed":
                    self.ended += 1
                    self.restarted.add(name)
            elif time.monotonic() >= self._due[name]:
                del self._due[name]
                self._start(name)

    def close(self) -> None:
        """Kill all that runs."""
        for process in [*self._replicas.values(), self._lighthouse]:
            if process is not None:
                process.kill()
                process.wait()

    def log(self, name: str) -> list[dict[str, Any]]:
        """Return what a replica has written, over all its lives."""
        path = self._folder / f"{name}.jsonl"
        if not path.exists():
            return []
        whole = path.read_bytes().rpartition(b"\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def version(self) -> str:
        """Return the versions of torchft and torch."""
        code = "from importlib import metadata as m\n"
        code += "print(m.version('torchft'), m.version('torch'))"
        python = str(self._venv / "bin" / "python")
        told = subprocess.run([python, "-c", code], capture_output=True, check=True)
        torchft, torch = told.stdout.decode().split()
        return f"torchft {torchft}, torch {torch}"

    def tail(self) -> str:
        """Return the last lines that the processes printed."""
        return "\n".join(
            line
            for path in sorted(self._folder.glob("*.log"))
            for line in path.read_text(errors="replace").splitlines()[-8:]
        )

    def _start_lighthouse(self) -> None:
        given = self._settings
        options = {
            "bind": f"[::]:{self._port}",
            "min_replicas": max(1, self._work.replicas - 1),
            "join_timeout_ms": given.join_timeout_ms,
            "heartbeat_timeout_ms": given.heartbeat_timeout_ms,
            "quorum_tick_ms": 100,
        }
        words = [part for k, v in options.items() for part in (f"--{k}", str(v))]
        command = [str(self._venv / "bin" / "torchft_lighthouse"), *words]
        self._lighthouse = self._popen("lighthouse", command)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(self._address, timeout=1.0).close()
                return
            time.sleep(POLL_S)
        raise RuntimeError(f"the lighthouse does not answer: {self.tail()}")

    @property
    def _address(self) -> str:
        return f"http://localhost:{self._port}"

    def _start(self, name: str) -> None:
        options = {
            "name": name,
            "log": str(self._folder / f"{name}.jsonl"),
            "pace": self._work.pace(name),
            "lighthouse": self._address,
            "timeout_s": self._settings.timeout_s,
            "quorum_retries": self._settings.quorum_retries,
            "until": self._until,
        }
        work = json.dumps(dataclasses.asdict(self._work))
        command = [str(self._venv / "bin" / "python"), str(REPLICA)]
        self._replicas[name] = self._popen(name, [*command, work, json.dumps(options)])

    def _popen(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        with (self._folder / f"{name}.log").open("ab") as output:
            return subprocess.Popen(
                command, stdout=output, stderr=output, env=environment
            )


def _outcome(work: Work, settings: Settings, group: _Group, began: float) -> Outcome:
    logs = {name: group.log(name) for name in work.names}
    steps = {
        name: [x["time"] for x in log if x["kind"] == "step" and x["time"] >= began]
        for name, log in logs.items()
    }
    ended = began + work.seconds
    books = {n: books_of(n, log, work.tokens_per_step) for n, log in logs.items()}
    forgotten = forgotten_at([line for log in logs.values() for line in log])
    merges = [merge for each in books.values() for merge in each.merges]
    lost = [merge for merge in merges if merge.time < forgotten]
    merges = [merge for merge in merges if forgotten <= merge.time <= ended]
    rate = useful_tokens(merges, began, ended) / work.seconds
    gap = max(longest_gap(steps[name], ended) for name in work.survivors)
    late = max((merge.time for merge in merges), default=0.0)
    losses = [x["loss"] for x in logs[work.names[0]] if x["kind"] == "step"][-20:]
    began_lines = [x for log in logs.values() for x in log if x["kind"] == "began"]
    return Outcome(
        system=settings.name,
        version=group.version(),
        scenario=work.scenario,
        replicas=work.replicas,
        parameters=sum(began_lines[0]["sizes"]),
        useful_per_second=rate,
        capacity=work.capacity,
        longest_gap_steps=gap / work.step_seconds,
        went_on=not group.restarted & set(work.survivors)
        and ended - late < work.steps_per_cycle * work.step_seconds * work.slow_factor,
        ended=group.ended,
        tokens_lost=sum(each.lost for each in books.values())
        + sum(sum(merge.tokens.values()) for merge in lost),
        bytes_loopback=None,
        tokens_useful=useful_tokens(merges, 0.0, ended),
        loss=sum(losses) / len(losses) if losses else float("nan"),
    )


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port
