"""A workdir that was moved or copied means its own files, wherever it is now.

One of somebody else runs no code that its config names, unless it may.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest

from diloco_jax import run_files
from diloco_jax.cli import main
from diloco_jax.cluster.processes import private_files, with_keys
from diloco_jax.commands import with_config
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    ModelConfig,
    Placement,
    RunConfig,
    config,
    loading,
)
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.evaluation import load_params
from diloco_jax.simulation.replay.recording import environment_like
from diloco_jax.wire.peers import COORDINATOR
from diloco_jax.wire.tls import TlsFiles
from diloco_jax.workdir import RunFacts, make_workdir, read_config


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


CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
def make(run, island, layout):
    raise ValueError("no model")
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "code.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def ran(code: Path) -> Path:
    """There is such a file once the code was executed."""
    return code.with_name("ran")


@pytest.fixture
def workdir(tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workdir of another user."""
    folder = tmp_path / "run"
    folder.mkdir()
    run = RunConfig(model=ModelConfig(factory=f"{code}:make"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    write_config_json(Config(run=run), folder / "config.json")
    RunFacts(run_id="r", begun_unix=1.0).write(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    return folder


def test_all_fields_that_name_code_are_sealed() -> None:
    run = RunConfig()
    assert loading.named_code(run) == {}, "members of the package are no such code"
    for field in (*config.FIELDS, "model.factory", "data.factory"):
        section, name = field.split(".")
        part = dataclasses.replace(getattr(run, section), **{name: "a.py:b"})
        changed = dataclasses.replace(run, **{section: part})
        assert loading.named_code(changed) == {field: "a.py:b"}


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "{0}"),
        ("replay", "{0}"),
        ("export", "{0}", "{0}-exported"),
        ("generate", "{0}"),
        ("run", "--resume", "{0}"),
        ("run", "quickstart", "--init", "run:{0}"),
        ("emulate", "quickstart", "--init", "run:{0}"),
    ],
)
def test_no_command_executes_the_code_of_another_user(
    command: tuple[str, ...],
    workdir: Path,
    ran: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([word.format(workdir) for word in command]) == 2
    assert not ran.exists()
    told = capsys.readouterr().err
    assert "names code (model.factory = " in told.replace("\n", " ")
    assert "give --trust-code" in " ".join(told.split())


def test_code_that_is_trusted_once_is_trusted(workdir: Path, ran: Path) -> None:
    with pytest.raises(ConfigError, match="names code"):
        load_params(workdir)
    with pytest.raises(ConfigError, match="no model"):
        load_params(workdir, trust_code=True)
    assert ran.exists()
    with pytest.raises(ConfigError, match="no model"):
        load_params(workdir)
    # Another config in its place is foreign again.
    other = (workdir / "config.json").read_text().replace(":make", ":makes")
    (workdir / "config.json").write_text(other)
    with pytest.raises(ConfigError, match="names code"):
        load_params(workdir)


def test_who_wrote_a_config_may_open_it(
    tmp_path: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    assert read_config(workdir).run.model.factory
    assert with_config(["--resume", str(workdir)])
    key = tmp_path / "theirs" / "diloco" / "key"
    assert key.stat().st_mode & 0o777 == 0o600
    key.write_bytes(b"short")
    with pytest.raises(ConfigError, match="names code"):
        read_config(workdir)


def test_a_workdir_without_code_needs_no_seal(tmp_path: Path) -> None:
    write_config_json(Config(), tmp_path / "config.json")
    assert not (tmp_path / "config.seal").exists()
    assert read_config(tmp_path) == Config()


def test_a_config_from_a_coordinator_is_foreign(code: Path) -> None:
    run = RunConfig(model=ModelConfig(factory=f"{code}:make"))
    with pytest.raises(ConfigError, match="the config of host:7077 names code"):
        loading.require_trust_flag(run, "the config of host:7077", trust_code=False)
    loading.require_trust_flag(run, "the config of host:7077", trust_code=True)
    loading.require_trust_flag(RunConfig(), "the config of host:7077", trust_code=False)


def test_a_recorded_flag_with_a_path_is_not_set() -> None:
    flags = "--xla_cpu_use_x=true --xla_dump_to=/tmp/x --xla_dump_hlo_as_text"
    recorded = {"platform": "cpu", "threads": 2, "xla_flags": flags}
    assert environment_like(recorded)["XLA_FLAGS"] == "--xla_cpu_use_x=true"
