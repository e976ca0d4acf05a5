"""docs/laptop.md, from its first command to its last, with fewer tokens."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "laptop.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.M | re.S)
LINES = [
    shlex.split(line, comments=True)[1:]
    for block in BLOCKS
    for line in block.splitlines()
]
TIMEOUT_S = 600.0
FEWER = {
    "run": ("--total-tokens", "150000"),
    "chaos": ("--total-tokens", "200000"),
    "emulate": ("--total-tokens", "20000"),
}


def smaller(line: list[str]) -> list[str]:
    """The line for a run of seconds."""
    if "--resume" in line:
        return line
    kept = [word for word in line if word not in ("--total-tokens", "100000")]
    kept = [re.sub(r"@(\d)0s:", r"@\1s:", word) for word in kept]
    return [*kept, *FEWER.get(line[0], ())]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


@pytest.fixture
def diloco(folder: Path):
    """Start a command of the page in the folder."""
    command = [sys.executable, "-m", "diloco_jax.cli"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    started = []

    def start(line: list[str]) -> subprocess.Popen:
        process = subprocess.Popen(
            [*command, *smaller(line)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def named(name: str, word: str = "") -> list[list[str]]:
    return [line for line in LINES if line[0] == name and (not word or word in line)]


def ended(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, said
    return said


def test_smaller_lines_are_other_ones_only_in_size():
    assert smaller(["chaos", "x", "--strikes", "v6e@20s:kill"])[3] == "v6e@2s:kill"
    assert {line[0] for line in LINES} == {
        *("run", "status", "dashboard", "chaos", "eval", "generate", "export"),
        *("replay", "emulate"),
    }


@pytest.mark.nightly
def test_the_tour_works(diloco, folder):
    first, resumed = named("run")
    running = diloco(first)
    deadline = time.monotonic() + TIMEOUT_S
    tape = folder / "runs" / "first" / "tape.jsonl"
    while not (tape.exists() and '"kind":"merged"' in tape.read_text()):
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.2)  # A file of another process.
    (status,) = named("status")
    assert "v5p-a" in ended(diloco(status))
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 1
    assert "validation loss" in ended(diloco(resumed))
    for name in ("eval", "generate", "export"):
        (line,) = named(name)
        assert ended(diloco(line))
    assert (folder / "exported" / "config.json").exists()
    (replay,) = named("replay")
    assert "with the same bits" in ended(diloco(replay))


@pytest.mark.nightly
def test_what_is_killed_comes_back(diloco):
    (line,) = named("chaos")
    said = ended(diloco(line))
    assert "v6e" in said
    assert "coordinator" in said


@pytest.mark.nightly
@pytest.mark.parametrize("line", named("emulate"), ids=" ".join)
def test_one_thing_is_changed(line, diloco):
    assert "validation loss" in ended(diloco(line))
