"""A workdir is of one run, of a format that can be read, and nobody shares it."""

import dataclasses
import json
import os

import pytest

from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError, IslandConfig, RunConfig


@pytest.fixture
def config():
    return Config(run=RunConfig(), islands={"a": IslandConfig()})


def test_a_run_is_found_as_it_was_begun(config, tmp_path):
    begun = workdirs.begin_run(config, tmp_path)
    assert workdirs.find_run(config, tmp_path) == begun


def test_another_config_is_refused_with_both_values(config, tmp_path):
    workdirs.begin_run(config, tmp_path)
    other = dataclasses.replace(config, run=RunConfig(seed=7))
    with pytest.raises(ConfigError, match="seed: 0 here, 7 there"):
        workdirs.find_run(other, tmp_path)


def test_another_format_is_refused_with_both_writers(config, tmp_path):
    facts = workdirs.begin_run(config, tmp_path)
    later = dataclasses.replace(facts, format=2, written_by="diloco_jax 9.0")
    later.write(tmp_path)
    with pytest.raises(ConfigError) as refused:
        workdirs.find_run(config, tmp_path)
    for shown in (str(tmp_path), "format 2", "diloco_jax 9.0", "format 1"):
        assert shown in str(refused.value)


def test_what_is_no_run_file_is_named(config, tmp_path):
    workdirs.begin_run(config, tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"run_id": 3}))
    with pytest.raises(ConfigError, match=r"run\.json cannot be read .*copy"):
        workdirs.find_run(config, tmp_path)


@pytest.mark.parametrize("name", ["coordinator.lock", "."])
def test_what_is_held_is_refused_with_its_holder(tmp_path, name):
    path = tmp_path / name
    with workdirs.held(path, "somebody"):
        with (
            pytest.raises(ConfigError, match=f"{tmp_path} is in use by somebody") as e,
            workdirs.held(path, "somebody", patience_s=0.0),
        ):
            pass
        assert (f"process {os.getpid()}" in str(e.value)) == (name != ".")
    with workdirs.held(path, "somebody", patience_s=0.0):
        pass
