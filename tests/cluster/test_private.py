"""A local run is closed to other users of its machine."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from diloco_jax import run_files
from diloco_jax.cluster import cluster
from diloco_jax.cluster.processes import private_files, with_keys, with_own_keys
from diloco_jax.config import Config, IslandConfig, Placement
from diloco_jax.wire.certificates import ISSUED, principals
from diloco_jax.wire.peers import COORDINATOR, OPERATOR, READER, island
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.workdir import make_workdir


def config_of(**placement: object) -> Config:
    islands = {"a": IslandConfig(), "b": IslandConfig()}
    return Config(islands=islands, placement=Placement(admit=("c",), **placement))


@pytest.fixture
def workdir(tmp_path: Path) -> Path:
    made = tmp_path / "runs" / "run"
    with private_files():
        make_workdir(made)
    return made


def test_a_local_run_has_keys_of_its_own(workdir: Path) -> None:
    config = with_keys(config_of(), workdir)
    keys = workdir / run_files.KEYS
    assert config.placement.certificates == str(keys)
    expected = {COORDINATOR, OPERATOR, READER, *map(island, "abc")}
    assert set(principals(keys)) == expected
    for who in expected:
        TlsFiles.load(keys, who)
    assert os.listdir(workdir) == [run_files.KEYS]
    command = cluster.coordinator_command(workdir, "127.0.0.1:0", "--init")
    assert command[command.index("--certificates") + 1] == str(keys)
    (own,) = cluster.island_commands(workdir, "a", 1, "127.0.0.1:1", 1)
    assert own[own.index("--certificates") + 1] == str(keys)


def test_a_run_that_goes_on_keeps_its_keys_and_gets_those_that_it_lacks(
    workdir: Path,
) -> None:
    with_keys(config_of(), workdir)
    keys = workdir / run_files.KEYS
    before = {path: path.read_bytes() for path in keys.iterdir()}
    signed = before.pop(keys / ISSUED)
    more = dataclasses.replace(config_of(), islands={"d": IslandConfig()})
    with_keys(more, workdir)
    assert {path: path.read_bytes() for path in before} == before
    assert (keys / ISSUED).read_bytes().startswith(signed)
    TlsFiles.load(keys, island("d"))


@pytest.mark.parametrize(
    "placement",
    [{"certificates": "certs"}, {"insecure": True}, {"bind": "0.0.0.0:7000"}],
)
def test_a_run_that_says_otherwise_has_none(
    workdir: Path, placement: dict[str, object]
) -> None:
    config = config_of(**placement)
    with_keys(config_of(), workdir)
    before = {path.name: path.read_bytes() for path in (workdir / "keys").iterdir()}
    assert with_keys(config, workdir) == config, "it had keys before it was stopped"
    (aside,) = workdir.iterdir()
    assert aside.name.startswith("keys."), "put aside, and nobody's keys are deleted"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
    assert with_own_keys(config.placement, workdir) == config.placement
    command = cluster.coordinator_command(workdir, "127.0.0.1:0", "--init")
    assert "--certificates" not in command


def test_a_run_that_names_its_own_keys_keeps_them(workdir: Path) -> None:
    with_keys(config_of(), workdir)
    named = config_of(certificates=str(workdir / run_files.KEYS))
    assert with_keys(named, workdir) == named
    TlsFiles.load(workdir / run_files.KEYS, COORDINATOR)
    # A config that was copied from the run, with another island.
    more = dataclasses.replace(named, islands={**named.islands, "late": IslandConfig()})
    with_keys(more, workdir)
    TlsFiles.load(workdir / run_files.KEYS, island("late"))


def test_only_the_owner_may_use_what_a_local_run_makes(workdir: Path) -> None:
    before = os.umask(0o022)
    try:
        with private_files():
            with_keys(config_of(), workdir)
            (workdir / "tape.jsonl").write_text("{}")
            (workdir / "logs").mkdir()
            subprocess.run(["touch", workdir / "logs" / "a.log"], check=True)
        (workdir.parent / "other").touch()
    finally:
        os.umask(before)
    made = [workdir, *workdir.rglob("*")]
    assert len(made) > 10
    assert [path for path in made if path.stat().st_mode & 0o077] == []
    assert (workdir.parent / "other").stat().st_mode & 0o777 == 0o644
