"""A workdir that was moved or copied means its own files, wherever it is now."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from diloco_jax import run_files
from diloco_jax.cluster.processes import private_files, with_keys
from diloco_jax.config import Config, DataConfig, IslandConfig, Placement, RunConfig
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.wire.principal import COORDINATOR
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.workdir import RunFacts, make_workdir


def placed(**placement: str) -> Config:
    return Config(islands={"a": IslandConfig()}, placement=Placement(**placement))


def written(config: Config, folder: Path) -> Path:
    """Return a workdir that began in `placement.workdir` and lies in `folder` now."""
    folder.mkdir(exist_ok=True)
    write_config_json(config, folder / run_files.CONFIG)
    RunFacts(run_id="r", begun_unix=1.0).write(folder)
    return folder


@pytest.mark.parametrize(
    ("field", "before", "now"),
    [
        ("certificates", "BEFORE/keys", "NOW/keys"),
        ("checkpoints", "BEFORE/my/snapshots", "NOW/my/snapshots"),
        ("workdir", "BEFORE", "NOW"),
        ("certificates", "/elsewhere/certs", "/elsewhere/certs"),
        ("checkpoints", "BEFORE-beside/snapshots", "BEFORE-beside/snapshots"),
        ("checkpoints", "gs://bucket/run", "gs://bucket/run"),
        ("certificates", "", ""),
    ],
)
def test_paths_inside_a_workdir_move_with_it(tmp_path, field, before, now) -> None:
    was, folder = tmp_path / "was", tmp_path / "now"
    given = {"workdir": str(was), field: before.replace("BEFORE", str(was))}
    read = read_config_json(written(placed(**given), folder) / run_files.CONFIG)
    expected = now.replace("NOW", str(folder)).replace("BEFORE", str(was))
    assert getattr(read.placement, field) == expected
    assert read.placement.workdir == str(folder)


def test_data_inside_a_workdir_moves_with_it(tmp_path, monkeypatch) -> None:
    was, folder = tmp_path / "was", tmp_path / "now"
    data = DataConfig(paths=(f"{was}/rows", "/corpus"), tokenizer=f"{was}/t.json")
    config = dataclasses.replace(placed(workdir=str(was)), run=RunConfig(data=data))
    written(config, folder)
    monkeypatch.chdir(tmp_path)
    read = read_config_json("now/config.json").run.data
    assert read.paths == (f"{folder}/rows", "/corpus")
    assert read.tokenizer == f"{folder}/t.json"


def test_a_config_that_was_copied_alone_means_what_it_says(tmp_path) -> None:
    was = tmp_path / "was"
    config = placed(workdir=str(was), certificates=f"{was}/keys")
    write_config_json(config, tmp_path / "mine.json")
    assert read_config_json(tmp_path / "mine.json") == config


@pytest.mark.parametrize("moves", [shutil.move, shutil.copytree])
def test_a_run_keeps_its_own_keys_where_it_is_now(tmp_path, moves) -> None:
    was, now = tmp_path / "was", tmp_path / "now"
    with private_files():
        make_workdir(was)
        written(with_keys(placed(workdir=str(was)), was), was)
    before = (was / run_files.KEYS / "ca.pem").read_bytes()
    moves(was, now)
    config = with_keys(read_config_json(now / run_files.CONFIG), now)
    assert config.placement.certificates == str(now / run_files.KEYS)
    assert (now / run_files.KEYS / "ca.pem").read_bytes() == before
    TlsFiles.load(config.placement.certificates, COORDINATOR)
