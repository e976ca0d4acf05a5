"""A workdir of somebody else runs no code that its config names, unless it may."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from diloco_jax import families
from diloco_jax.cli import main
from diloco_jax.cluster.run import with_config
from diloco_jax.config import (
    Config,
    ConfigError,
    ModelConfig,
    Placement,
    RunConfig,
    loading,
)
from diloco_jax.config.loading import write_config_json
from diloco_jax.evaluation import load_params
from diloco_jax.simulation.replay.recording import environment_like
from diloco_jax.workdir import RunFacts, read_config

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
    assert set(loading.CODE_FIELDS) == {
        *families.FIELDS,
        "model.factory",
        "data.factory",
    }
    run = RunConfig()
    assert loading.named_code(run) == {}, "members of the package are no such code"
    for field in loading.CODE_FIELDS:
        section, name = field.split(".")
        part = dataclasses.replace(getattr(run, section), **{name: "a.py:b"})
        changed = dataclasses.replace(run, **{section: part})
        assert loading.named_code(changed) == {field: "a.py:b"}


def test_a_command_for_alerts_is_code_of_whoever_wrote_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(placement=Placement(alert_command="mail me"))
    path = tmp_path / "config.json"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "theirs"))
    write_config_json(config, path)
    RunFacts(run_id="r", begun_unix=1.0).write(tmp_path)
    with_config(["--resume", str(tmp_path)])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "mine"))
    with pytest.raises(ConfigError, match=r"alert_command = 'mail me'.*--trust-code"):
        with_config(["--resume", str(tmp_path)])
    with_config(["--resume", str(tmp_path), "--trust-code"])
    with_config(["--resume", str(tmp_path)])


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
