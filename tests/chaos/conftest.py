"""Runs to strike, whose processes only sleep. The fault matrix and the soak are
benchmarks; their parts are tested here."""

import subprocess
import sys
from pathlib import Path

import pytest

from diloco_jax import run_files
from diloco_jax.files import write_json

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture
def children(tmp_path):
    """Processes of islands a and b, as `diloco run` notes them."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    made = {n: subprocess.Popen(command, start_new_session=True) for n in ("a", "b")}
    write_json({n: [c.pid] for n, c in made.items()}, tmp_path / run_files.PROCESSES)
    yield made
    for child in made.values():
        child.kill()
        child.wait()
