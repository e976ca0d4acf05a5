"""The processes that a strike meets, and no others."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.chaos import schedule
from diloco_jax.files import write_json


def test_a_worker_is_the_process_that_its_lead_noted(tmp_path: Path) -> None:
    assert schedule.found(tmp_path, "worker-1") == []
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, start_new_session=True
    ) as worker:
        (tmp_path / run_files.WORKERS).mkdir()
        write_json({"pid": worker.pid}, tmp_path / run_files.WORKERS / "1.json")
        assert schedule.found(tmp_path, "worker-0") == []
        (send,) = schedule.found(tmp_path, "worker-1")
        assert send(signal.SIGKILL)
        assert worker.wait(30.0) == -signal.SIGKILL
    assert not send(signal.SIGCONT), "it has ended"


def test_a_number_that_leads_no_group_is_another_process_by_now(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        noted = {"coordinator": [child.pid]}
        write_json(noted, tmp_path / run_files.PROCESSES)
        (send,) = schedule.found(tmp_path, "coordinator")
        assert not send(signal.SIGKILL)
        child.communicate(b"\n", 30.0)
    assert child.returncode == 0
