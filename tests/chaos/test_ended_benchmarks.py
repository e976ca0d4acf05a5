"""A benchmark that is asked to end leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import fault_matrix
import pytest
import support
from fault_cases import CASES
from tiny import MODEL

from diloco_jax.errors import EXIT_FAILED

PATIENCE_S = 60.0
BENCHMARK = """
import sys
from pathlib import Path

import support
from diloco_jax.config import Config

RUN = '''
import os, signal, sys
from pathlib import Path

folder = Path(sys.argv[1])

def end(*arguments):
    (folder / "in_order").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
(folder / "scratch").write_text(str(os.getpid()))
(folder / "scratch").rename(folder / "begun")
signal.pause()
'''
folder = Path(sys.argv[1])
support.DILOCO = (sys.executable, "-c", RUN, folder)

def main():
    support.run_in(Config(), folder, 600.0)
    return 0

support.script(main)
"""


def await_(happened) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_run_of_a_benchmark_ends_with_it(tmp_path, number):
    if number == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("the kernel ends no children here")
    where = Path(support.__file__).parent
    command = [sys.executable, "-c", BENCHMARK, str(tmp_path)]
    benchmark = subprocess.Popen(command, cwd=where)
    try:
        await_(lambda: (tmp_path / "begun").exists() or benchmark.poll() is not None)
        run = Path("/proc") / (tmp_path / "begun").read_text()
        benchmark.send_signal(number)
        killed = number == signal.SIGKILL
        code = benchmark.wait(PATIENCE_S)
        assert code == (-number if killed else EXIT_FAILED)
        assert (tmp_path / "in_order").exists() == (not killed)
        if killed:
            await_(lambda: not run.exists())
        assert not run.exists()
    finally:
        benchmark.kill()
        benchmark.wait()


def test_no_cell_is_measured_of_a_run_that_was_cut_off(tmp_path, monkeypatch):
    """A signal to the matrix ends the run that it waits for, and then the matrix."""

    def cut_off(config, path, console, options, **more):
        console.print("ending: islands say goodbye")
        return EXIT_FAILED, {}

    monkeypatch.setattr(fault_matrix.command, "run", cut_off)
    case = CASES[0]
    with pytest.raises(support.RunError, match=r"(?s)cut off.*say goodbye"):
        fault_matrix.run_cell(case, case.phases[0], tmp_path, MODEL)
