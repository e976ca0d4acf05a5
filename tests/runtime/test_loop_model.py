"""A model that only loops of users know how to train: other commands say what they
lack."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from config_support import load_config
from example_support import write_files

from diloco_jax import cli
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator import main

# One island, which the page has not: with a slice to plan for, and a time of a step.
CONFIG = """
import dataclasses
import run
from diloco_jax.config import IslandConfig

def config():
    island = IslandConfig(
        batch_size=4, topology="v6e:2x2", mesh_fsdp=4, step_seconds=1.0
    )
    return dataclasses.replace(run.config(), islands={"fast": island})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The files of docs/embed.md, and the workdir of a run that has begun."""
    folder = tmp_path_factory.mktemp("loop_model")
    write_files(folder)
    (folder / "alone.py").write_text(CONFIG)
    config = resolve(load_config(folder / "run.py"))
    coordinator = main.Coordinator(config, folder / "begun", init=True)
    try:
        coordinator.start()
    finally:
        coordinator.close()
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "emulate alone.py",
        "run alone.py",
        pytest.param(
            "plan alone.py",
            marks=[
                pytest.mark.tpu_compile,
                pytest.mark.skipif(not find_spec("libtpu"), reason="needs libtpu"),
            ],
        ),
        "eval begun --trust-code",
    ],
)
def test_a_command_that_needs_a_loss_says_so(command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    assert cli.main(command.split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "gives no loss, so only train loops that call diloco_jax.join can" in said
    assert not (folder / "runs").exists()
