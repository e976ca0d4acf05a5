"""Restart, refusal, stopping, and no orphans: with real children that do nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from diloco_jax.cluster import processes
from diloco_jax.cluster.processes import (
    ManagedProcess,
    log_tail,
    next_attempt,
    start_child,
)
from diloco_jax.config import ConfigError
from diloco_jax.workdir import RELEASE_S

pytestmark = pytest.mark.dist

LATE_S = 60.0

FOREVER = "import time\nprint('up', flush=True)\ntime.sleep(600)"
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FOREVER


@pytest.fixture
def make(tmp_path):
    made = []

    def make(*codes, **options):
        options = {"restarts": 2, "restart_delay_s": 0.01, "stop_s": 60.0, **options}

        def commands(start):
            return [[sys.executable, "-c", code, str(start)] for code in codes]

        process = ManagedProcess(
            "child", commands, tmp_path / "logs" / "child.log", **options
        )
        made.append(process)
        process.start()
        return process

    def make_with_environment(*codes, **options):
        return make(*codes, **{"environment": {}, **options})

    yield make_with_environment
    for process in made:
        process.kill()


def text(process):
    return process.log.read_text() if process.log.exists() else ""


def test_output_and_errors_go_to_the_log_and_the_environment_is_added(make, until):
    code = "import os,sys; print(os.environ['WHO']); print('oops', file=sys.stderr)"
    process = make(code, environment={"WHO": "v6e"})
    until(lambda: process.poll() == "done", "done")
    assert sorted(text(process).split()) == ["oops", "v6e"]


def test_a_crashed_child_is_restarted_as_the_next_attempt(make, until):
    process = make("import sys; sys.exit(1 if sys.argv[1] == '1' else 0)")
    until(lambda: process.poll() == "done", "done")
    assert process.starts == 2


def test_restarts_wait_for_the_delay(make, until):
    now = [0.0]
    process = make("raise SystemExit(1)", restart_delay_s=5.0, clock=lambda: now[0])
    until(lambda: process.poll() == "restarting", "crash")
    now[0] = 4.9
    assert process.poll() == "restarting"
    assert "exited 1; restarts in 5 s" in process.reason
    now[0] = 5.0
    process.poll()
    assert process.starts == 2


@pytest.mark.parametrize(
    "error", [OSError(errno.EAGAIN, "try again"), ConfigError("no port: try again")]
)
def test_a_process_that_cannot_be_started_again_counts_as_a_crash(
    make, until, monkeypatch, error
):
    """The first host of an island of two, which was started, ends too."""
    now, begun = [0.0], []
    process = make(
        *["raise SystemExit(1)"] * 2, restart_delay_s=700.0, clock=lambda: now[0]
    )
    until(lambda: process.poll() == "restarting", "crash")

    def start_one(*arguments):
        if len(begun) % 2:
            begun.append(None)
            raise error
        begun.append(start_child([sys.executable, "-c", FOREVER], *arguments[1:]))
        return begun[-1]

    monkeypatch.setattr(processes, "start_child", start_one)
    for state in ("restarting", "failed"):
        now[0] += 700.0
        assert process.poll() == state
        assert process.pids == []
    assert all(child.poll() is not None for child in begun if child is not None)
    assert "could not be started" in process.reason
    assert "try again) in attempt 3; no restart is left" in process.reason


def test_a_life_of_ten_minutes_ends_a_row_of_crashes(make, until):
    now = [0.0]
    process = make(FOREVER, restarts=1, restart_delay_s=0.0, clock=lambda: now[0])

    def crash(after_s):
        now[0] += after_s
        starts = process.starts
        os.kill(process.pids[0], signal.SIGKILL)
        until(
            lambda: process.poll() == "failed" or process.starts > starts, "next state"
        )
        return process.state

    assert [crash(s) for s in (9.0, 600.0, 600.0, 599.0)] == [
        *["running"] * 3,
        "failed",
    ]
    assert process.starts == 4


@pytest.mark.parametrize(("code", "state"), [(3, "refused"), (2, "failed")])
def test_what_another_attempt_cannot_cure_is_not_restarted(make, until, code, state):
    process = make(f"import sys; print('first'); print('why'); sys.exit({code})")
    until(lambda: process.poll() == state, state)
    assert process.starts == 1
    assert process.reason == "why"


def test_stop_asks_first(make, until):
    code = (
        "import signal,sys,time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('bye') or 0))\n"
    )
    process = make(code + FOREVER)
    until(lambda: "up" in text(process), "start")
    process.stop()
    until(lambda: process.poll() == "done", "end")
    assert "bye" in text(process)


@pytest.mark.parametrize("more_s", [0.0, 60.0])
def test_stop_kills_the_deaf_after_its_deadline(make, until, more_s):
    now = [0.0]
    process = make(DEAF, stop_s=5.0, clock=lambda: now[0])
    until(lambda: "up" in text(process), "start")
    process.stop(more_s)
    now[0] = 4.9 + more_s
    assert process.poll() == "running"
    now[0] = 5.1 + more_s
    until(lambda: process.poll() == "stopped", "kill")
    assert process.starts == 1


def test_stop_cancels_a_restart(make, until):
    process = make("raise SystemExit(1)", restart_delay_s=60.0)
    until(lambda: process.poll() == "restarting", "crash")
    process.stop()
    assert process.poll() == "stopped"


def test_a_stopped_process_is_ended_too(make, until, alive):
    process = make(FOREVER)
    until(lambda: "up" in text(process), "start")
    (pid,) = process.pids
    os.kill(pid, signal.SIGSTOP)
    process.kill()
    assert not alive(pid)
    assert process.state == "stopped"


def test_who_is_killed_is_not_asked_to_end_first(make, until, monkeypatch):
    """It might begin to write its summary, or not."""
    process = make(FOREVER)
    until(lambda: "up" in text(process), "start")
    monkeypatch.setattr(
        subprocess.Popen, "terminate", lambda child: pytest.fail("asked to end")
    )
    process.kill()
    assert (process.state, process.exit_code) == ("stopped", -signal.SIGKILL)


def test_children_of_a_crashed_child_are_ended_with_it(make, until, alive):
    code = (
        "import subprocess,sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(p.pid, flush=True)\n"
        "sys.exit(3)"
    )
    process = make(code)
    until(lambda: process.poll() == "refused", "end")
    grandchild = int(text(process))
    until(lambda: not alive(grandchild), "end of the grandchild")


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's doing, on Linux")
@pytest.mark.parametrize("child", [FOREVER, DEAF])
def test_children_do_not_outlive_a_killed_launcher(tmp_path, until, alive, child):
    log = tmp_path / "child.log"
    launcher_code = (
        "import pathlib, sys, time\n"
        "from diloco_jax.cluster.processes import ManagedProcess\n"
        f"p = ManagedProcess('c', lambda n: [[sys.executable, '-c', {child!r}]],"
        f" pathlib.Path({str(log)!r}), environment={{}}, restarts=0,"
        " restart_delay_s=1.0, stop_s=1.0)\n"
        "p.start()\n"
        "print(p.pids[0], flush=True)\n"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", launcher_code], stdout=subprocess.PIPE
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        until(lambda: log.exists() and "up" in log.read_text(), "start of the child")
        assert alive(pid)
        launcher.kill()
    until(lambda: not alive(pid), "end of the child")


def test_log_tail_is_short_and_tolerant(tmp_path):
    path = tmp_path / "x.log"
    assert log_tail(path, 3) == []
    path.write_text("".join(f"line {n}\n\n" for n in range(10_000)))
    assert log_tail(path, 2) == ["line 9998", "line 9999"]


def test_attempts_count_by_name_and_survive_the_process(tmp_path):
    path = tmp_path / "attempts.json"
    assert [next_attempt(path, name) for name in ("a", "a", "b")] == [1, 2, 1]
    assert {p.name for p in tmp_path.iterdir()} == {"attempts.json", "attempts.lock"}


def test_islands_that_start_together_are_all_counted(tmp_path, monkeypatch):
    path, read = tmp_path / "attempts.json", processes._read
    reading, go_on = threading.Event(), threading.Event()

    def slow_for_one(path):
        counts = read(path)
        if not reading.is_set():
            reading.set()
            assert go_on.wait(LATE_S)
        return counts

    monkeypatch.setattr(processes, "_read", slow_for_one)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(next_attempt, path, "a")
        assert reading.wait(LATE_S)
        second = pool.submit(next_attempt, path, "b")
        with pytest.raises(TimeoutError):
            second.result(RELEASE_S + 0.5)  # A disk may take longer than a kill.
        go_on.set()
        assert (first.result(LATE_S), second.result(LATE_S)) == (1, 1)
    assert json.loads(path.read_bytes()) == {"a": 1, "b": 1}


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": "x"}'])
def test_unreadable_attempts_are_an_error_that_names_the_remedy(tmp_path, content):
    path = tmp_path / "attempts.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--incarnation"):
        next_attempt(path, "a")
    assert path.read_text() == content


def test_hosts_of_an_island_end_and_start_together(make, until, alive):
    dies = "import sys, time; time.sleep(0 if sys.argv[1] == '1' else 600); sys.exit(5)"
    process = make(FOREVER, dies)
    first = process.pids
    assert len(first) == 2
    until(lambda: process.poll() == "running" and process.starts == 2, "2nd attempt")
    assert not any(alive(pid) for pid in first)
    assert process.exit_code == 5
    second = process.pids
    process.kill()
    assert process.state == "stopped"
    assert not any(alive(pid) for pid in second)


def test_hosts_that_end_well_are_done_when_the_last_one_is(make, until, tmp_path):
    there = f"os.path.exists({str(tmp_path / 'go')!r})"
    waits = f"import os, time\nwhile not {there}: time.sleep(.01)"
    process = make("print('host 0')", waits + "\nprint('host 1')")
    until(lambda: process._processes[0].poll() == 0, "end of host 0")
    assert process.poll() == "running"
    (tmp_path / "go").touch()
    until(lambda: process.poll() == "done", "end of host 1")
    logs = tmp_path / "logs"
    assert (logs / "child.log").read_text() == "host 0\n"
    assert (logs / "child.1.log").read_text() == "host 1\n"


def test_the_cause_that_no_attempt_cures_is_the_one_reported(make, until):
    process = make("import sys; sys.exit(1)", "import sys; sys.exit(2)")
    for child in process._processes:
        child.wait(LATE_S)
    assert process.poll() == "failed"
    assert process.exit_code == 2
