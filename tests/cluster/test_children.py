"""Children: they live as long as the launcher, and run what is installed."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from pathlib import Path

import pytest

import diloco_jax
from diloco_jax.cluster import processes
from diloco_jax.cluster.cluster import DILOCO
from diloco_jax.cluster.processes import kill_group, start_child

PACKAGE = Path(diloco_jax.__file__).parent
OF_PYTHON = re.compile(r"\[?\(?sys\.executable, (\"[^\"]*\")")


def test_a_child_outlives_the_thread_that_asked_for_it() -> None:
    made: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        null, command = subprocess.DEVNULL, ["sh", "-c", "echo begun; exec sleep 60"]
        made.append(start_child(command, {}, subprocess.PIPE, null))
        # From here on the kernel would kill it with this thread.
        assert made[0].stdout is not None
        made[0].stdout.readline()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    (child,) = made
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.3)
    finally:
        kill_group(child)
        child.communicate(timeout=10)


def test_a_command_that_is_not_there_is_an_error_of_the_caller(monkeypatch) -> None:
    monkeypatch.setattr(processes.sys, "executable", "/no/such/python")
    null = subprocess.DEVNULL
    with pytest.raises(FileNotFoundError):
        start_child(["sleep", "60"], {}, null, null)


def test_a_fork_starts_children_as_well() -> None:
    null = subprocess.DEVNULL
    assert start_child(["true"], {}, null, null).wait(10) == 0
    before, processes._starter = processes._starter, None  # As a fork finds it.
    try:
        assert start_child(["true"], {}, null, null).wait(10) == 0
    finally:
        processes._starter = before


def test_every_python_of_ours_leaves_the_current_folder_out() -> None:
    found = {
        (path.name, option)
        for path in PACKAGE.rglob("*.py")
        for option in OF_PYTHON.findall(path.read_text())
    }
    assert len(found) > 5
    assert {option for _, option in found} <= {'"-P"', '"-IS"'}


def test_a_file_of_the_current_folder_replaces_no_module(tmp_path) -> None:
    for name in ("random", "queue", "secrets"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('of the folder')")
    done = subprocess.run(
        [*DILOCO, "completion", "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
