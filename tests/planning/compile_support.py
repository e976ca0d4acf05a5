"""`diloco plan` of a config whose islands are compiled for their slices."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="needs libtpu: pip install -e '.[tpu]'",
)


def run_plan(config, *options, timeout_s=280, **environment):
    command = [sys.executable, "-m", "diloco_jax.cli", "plan", str(config), "--json"]
    return subprocess.run(
        [*command, *options],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def plan(config, *options, timeout_s=280):
    done = run_plan(config, *options, timeout_s=timeout_s)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)
