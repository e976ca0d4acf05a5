"""Ask SkyPilot, which is in another Python's environment."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from diloco_jax.launch.manifests import yaml_text

VARIABLE = "DILOCO_SKY_PYTHON"
"""Names that Python; `.ci/sky` makes one."""
WAIT_S = 200.0
PROGRAM = Path(__file__).with_name("ask_sky.py")

needs_sky = pytest.mark.skipif(
    VARIABLE not in os.environ, reason=f"no SkyPilot: {VARIABLE} names no Python"
)


def place(made, folder):
    """Write these jobs; return their files."""
    for name, task in made.items():
        (folder / name).write_text(yaml_text(task))
    return [str(folder / name) for name in made if name.endswith(".yaml")]


def ask(folder, *words):
    """Return what `ask_sky.py` prints; an error of SkyPilot's is an AssertionError."""
    done = subprocess.run(
        [os.environ[VARIABLE], PROGRAM, *words],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
