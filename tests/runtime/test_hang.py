"""An island that hangs as it starts says where, and ends."""

from __future__ import annotations

import subprocess
import sys

import pytest
from runtime_support import coordinator, make_config, placed

from diloco_jax import run_files
from diloco_jax.config.loading import write_config_json
from diloco_jax.observability.tape import read_tape

pytestmark = [pytest.mark.dist]

TIMEOUT_S = 240.0
HANGS_AS_IT_COMPILES = """
import sys, threading
from pathlib import Path
from diloco_jax.config.loading import read_config_json
from diloco_jax.before_jax import prepare_island
config, address, workdir = read_config_json(Path(sys.argv[1])), *sys.argv[2:]
prepare_island(config.island("a"))
from diloco_jax.island import main
from diloco_jax.process import setup_logging
def where_it_hangs(host):
    threading.Event().wait(600)
setup_logging()
main.TrainingHost.compile = where_it_hangs
sys.exit(main.run(config, "a", address, Path(workdir), 1))
"""


def test_a_compiler_that_hangs_ends_the_island_which_says_so(text, tmp_path):
    """Its reports go on meanwhile: to the coordinator it lives."""
    config = placed(make_config(text), compile_budget_s=2.0, hang_budget_s=2.0)
    write_config_json(config, tmp_path / "config.json")
    with coordinator(config, tmp_path / "run") as service:
        arguments = [tmp_path / "config.json", service.address, tmp_path / "a"]
        done = subprocess.run(
            [sys.executable, "-c", HANGS_AS_IT_COMPILES, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    assert "in where_it_hangs" in done.stderr, "the stack says where"
    tape = list(read_tape(tmp_path / "run" / run_files.TAPE))
    (left,) = [line for line in tape if line["kind"] == "left"]
    assert left["reason"] == "failed"
    assert "compiling may take 4 s (placement.compile_budget_s)" in left["said"]
    alerts = [line["text"] for line in tape if line["kind"] == "alert"]
    assert any("island 'a' failed, and says: hangs" in text for text in alerts)
