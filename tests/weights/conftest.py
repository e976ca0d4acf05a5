"""Configs and runs of a tiny model, and the float64 reference of its parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tiny
from begin_support import begun

sys.path.append(str(Path(__file__).parents[1] / "models"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import reference_forward as reference

from diloco_jax import cli
from diloco_jax.config import Config, DataConfig, IslandConfig, RunConfig, SyncConfig


def config_of(folder: Path) -> Config:
    """A run of bytes."""
    text = folder / "text"
    text.mkdir()
    (text / "a.txt").write_text("one line of text\n" * 2000)
    run = RunConfig(
        model=tiny.UNLIKE,
        data=DataConfig(paths=(str(text),)),
        sync=SyncConfig(fragments=3),
        sequence_length=tiny.SEQUENCE_LENGTH,
    )
    return Config(run=run, islands={"a": IslandConfig()})


@pytest.fixture(scope="package")
def workdir(tmp_path_factory):
    """The workdir of a run of bytes that has begun."""
    folder = tmp_path_factory.mktemp("tasks")
    return begun(config_of(folder), "", folder / "run")


@pytest.fixture(scope="package")
def exported(workdir):
    """config.json and tensors of the same parameters, for the reference."""
    target = workdir.parent / "export"
    assert cli.main(["export", str(workdir), str(target)]) == 0
    return reference.load(target)


@pytest.fixture
def config(tmp_path) -> Config:
    return config_of(tmp_path)
