"""The processes that a strike meets, and no others."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diloco_jax import run_files
from diloco_jax.chaos import schedule
from diloco_jax.files import write_json

LISTENS = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
while True:
    listener.accept()[0].close()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd, SO_PEERCRED")
def test_a_worker_is_where_its_place_says(tmp_path: Path) -> None:
    assert schedule.found(tmp_path, "worker-1") == []
    place = tmp_path / "socket"
    command = [sys.executable, "-c", LISTENS, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"listens\n"
        (tmp_path / run_files.WORKERS).mkdir()
        write_json({"socket": str(place)}, tmp_path / run_files.WORKERS / "1.json")
        assert schedule.found(tmp_path, "worker-0") == []
        (send,) = schedule.found(tmp_path, "worker-1")
        assert send(signal.SIGKILL)
        assert worker.wait(30.0) == -signal.SIGKILL
    assert not send(signal.SIGCONT), "it has ended"
    assert schedule.found(tmp_path, "worker-1") == []


def test_a_number_that_leads_no_group_is_another_process_by_now(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        noted = {"coordinator": [child.pid]}
        write_json(noted, tmp_path / run_files.PROCESSES)
        (send,) = schedule.found(tmp_path, "coordinator")
        assert not send(signal.SIGKILL)
        child.communicate(b"\n", 30.0)
    assert child.returncode == 0
