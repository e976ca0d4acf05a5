"""`diloco run --resume WORKDIR`: what it goes on with, before anything is started."""

import dataclasses
import json

import pytest
from rich.console import Console

from diloco_jax import workdir as workdirs
from diloco_jax.cluster.run import (
    ReplacedFiles,
    finished,
    resumed_config,
    tell_extended,
)
from diloco_jax.commands import require_one_workdir, with_config
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    OuterConfig,
    RunConfig,
)
from diloco_jax.config.loading import read_config_json
from diloco_jax.config.resolving import LONG
from diloco_jax.core.inner import learning_rate


@pytest.fixture
def config():
    outer = OuterConfig(optimizer="sgd", learning_rate=0.7, momentum=0.0)
    run = RunConfig(data=DataConfig(digest="d1"), outer=outer, sync=LONG)
    return Config(run=run, islands={"a": IslandConfig(), "b": IslandConfig()})


@pytest.fixture
def workdir(config, tmp_path):
    workdirs.begin_run(config, tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["c.py", "--json"], ["c.py", "--json"]),
        (["c.py", "--resume", "w"], ["c.py", "--resume", "w"]),
        (["--resume", "w", "--json"], ["w/config.json", "--resume", "w", "--json"]),
        (["--resume=w"], ["w/config.json", "--resume=w"]),
        ([], []),
    ],
)
def test_the_workdirs_config_stands_in_for_one_that_is_not_given(
    given, meant, workdir, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w").mkdir()
    for name in ("run.json", "config.json"):
        (tmp_path / "w" / name).write_bytes((workdir / name).read_bytes())
    assert with_config(given) == meant


def test_another_workdir_than_that_of_the_run_is_refused(workdir):
    with pytest.raises(ConfigError, match=f"W9 with --resume {workdir}: a run goes on"):
        require_one_workdir(["--placement.workdir"], "W9", str(workdir))
    require_one_workdir(["--workdir"], f"{workdir}/../{workdir.name}", str(workdir))
    require_one_workdir(["c.py"], "of a configs file", str(workdir))


def test_what_the_run_decided_once_stays_decided(config, workdir):
    """As if from the run's configs file, for other islands."""
    given = Config(run=RunConfig(), islands={"c": IslandConfig(batch_size=2)})
    resumed = resumed_config(given, workdir)
    assert resumed.run == config.run
    assert resumed.islands == given.islands


def test_the_model_of_weights_stays_that_of_the_run(config, tmp_path):
    """CONFIG never named them; one that names a model of its own weights does."""
    model = dataclasses.replace(config.run.model, qk_norm=True, weights="hf:/w")
    of_weights = dataclasses.replace(config.run, model=model)
    workdirs.begin_run(dataclasses.replace(config, run=of_weights), tmp_path)
    assert resumed_config(config, tmp_path).run.model == model
    own = dataclasses.replace(config.run.model, weights="hf:/other")
    other = dataclasses.replace(config.run, model=own)
    differs = r"model\.qk_norm: True in the run, False in the config"
    with pytest.raises(ConfigError, match=differs):
        resumed_config(dataclasses.replace(config, run=other), tmp_path)


def test_other_settings_are_refused_and_nothing_changes(config, workdir):
    before = {p: p.read_bytes() for p in workdir.iterdir()}
    outer = OuterConfig(optimizer="sgd", learning_rate=0.9, momentum=0.0)
    given = dataclasses.replace(
        config, run=dataclasses.replace(config.run, outer=outer, sequence_length=8)
    )
    with pytest.raises(ConfigError) as refused:
        resumed_config(given, workdir)
    for shown in (
        "outer.learning_rate: 0.7 in the run, 0.9 in the config",
        "sequence_length: 128 in the run, 8 in the config",
        str(workdir),
    ):
        assert shown in str(refused.value)
    assert {p: p.read_bytes() for p in workdir.iterdir()} == before


def with_tokens(config, total_tokens):
    run = dataclasses.replace(config.run, total_tokens=total_tokens)
    return dataclasses.replace(config, run=run)


def test_a_run_that_is_over_gets_more_tokens(config, workdir):
    summary = {"phase": "done", "tokens": 1_000_016, "parameters_digest": "d"}
    (workdir / "summary.json").write_text(json.dumps(summary))
    assert finished(config, workdir)
    more = resumed_config(with_tokens(config, 1_000_017), workdir)
    assert more.run.total_tokens == 1_000_017
    assert not finished(more, workdir)
    with pytest.raises(ConfigError, match=r"1000016, but .* 1000016 tokens already"):
        resumed_config(with_tokens(config, 1_000_016), workdir)
    differs = "total_tokens: 1000000 in the run, 999999 in the config"
    with pytest.raises(ConfigError, match=differs):
        resumed_config(with_tokens(config, 999_999), workdir)
    other = dataclasses.replace(config.run, total_tokens=2_000_000, seed=9)
    with pytest.raises(ConfigError, match="seed: 0 in the run, 9 in the config"):
        resumed_config(dataclasses.replace(config, run=other), workdir)


def test_a_run_on_its_way_gets_no_more_tokens(config, workdir):
    for summary in ("", '{"phase": "stopped", "tokens": 500}'):
        if summary:
            (workdir / "summary.json").write_text(summary)
        with pytest.raises(ConfigError, match="on its way to 1000000: leave total_tok"):
            resumed_config(with_tokens(config, 2_000_000), workdir)


def test_an_extension_says_what_becomes_of_the_learning_rate(config, workdir, capsys):
    (workdir / "summary.json").write_text('{"phase": "done", "tokens": 1000000}')
    console = Console(width=200)
    tell_extended(config, workdir, console)
    assert capsys.readouterr().out == ""
    inner = config.run.inner
    tell_extended(with_tokens(config, 2_000_000), workdir, console)
    shown = capsys.readouterr().out
    assert "extended from 1,000,000 to 2,000,000 tokens" in shown
    ended, goes_on = learning_rate(inner, 1.0), learning_rate(inner, 0.5)
    assert ended < goes_on
    assert f"ended at {ended:.3g}, goes on from {goes_on:.3g}" in shown


def test_a_start_that_failed_leaves_the_workdir_as_it_was(config, workdir):
    (workdir / "summary.json").write_text('{"merges": 3}')
    (workdir / "coordinator.address").write_text("of one that was killed")
    other = dataclasses.replace(config, islands={"c": IslandConfig()})
    change = ReplacedFiles(other, workdir)
    assert read_config_json(workdir / "config.json") == other
    assert not (workdir / "summary.json").exists()
    assert not (workdir / "coordinator.address").exists()
    change.undo()
    assert read_config_json(workdir / "config.json") == config
    assert (workdir / "summary.json").exists()
