"""Paths of a config mean the same in any folder."""

import errno
from pathlib import Path

import pytest

from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    Placement,
    RunConfig,
)
from diloco_jax.config.resolving import with_absolute_paths
from diloco_jax.files import absolute, naming


def test_paths_are_those_of_the_folder_that_they_were_written_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = Config(
        run=RunConfig(
            data=DataConfig(paths=("text", "~/more")),
            model=ModelConfig(factory="models/m.py:make"),
        ),
        placement=Placement(
            workdir="~/runs/x", certificates="certs", checkpoints="gs://bucket/folder"
        ),
    )
    made = with_absolute_paths(config)
    assert made.run.data.paths == (str(tmp_path / "text"), "/home/somebody/more")
    assert made.run.model.factory == str(tmp_path / "models/m.py:make")
    assert made.placement == Placement(
        workdir="/home/somebody/runs/x",
        certificates=str(tmp_path / "certs"),
        checkpoints="gs://bucket/folder",
    )
    assert made.run.fingerprint() == config.run.fingerprint()


def test_what_names_no_file_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(run=RunConfig(model=ModelConfig(factory="package.module:make")))
    assert with_absolute_paths(config) == config
    assert not Path("runs").exists()


def test_the_folder_of_nobody_is_refused():
    with pytest.raises(ConfigError, match=r"~nobody-here/x: .* whole name, or \./~nob"):
        absolute("~nobody-here/x")


def write_to_a_full_disk():
    with naming("the file"), Path("/dev/full").open("wb") as file:
        file.write(b"x")
        file.flush()


def test_a_write_that_fails_names_its_file():
    with pytest.raises(OSError, match="No space left on device") as failed:
        write_to_a_full_disk()
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, "the file")


def test_an_error_that_names_its_file_keeps_that():
    with pytest.raises(OSError, match="nowhere"), naming("the file"):
        Path("nowhere").read_bytes()
