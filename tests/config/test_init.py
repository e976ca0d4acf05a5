"""`diloco init`, and the configs that come with the package."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from diloco_jax import cli
from diloco_jax.config import Config, IslandConfig, loading
from diloco_jax.config.init_command import render
from diloco_jax.config.loading import read_config
from diloco_jax.errors import ConfigError


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", loading.named_configs())
def test_what_it_writes_is_the_config(name, whole, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(render(read_config(name), "Mine.", whole=whole))
    assert read_config(file) == read_config(name)
    command = [sys.executable, "-m", "ruff", "format", "--check", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_every_field_has_its_help_once():
    config = Config(islands={"a": IslandConfig(), "b": IslandConfig()})
    source = " ".join(render(config, "All.", whole=True).replace("#", "").split())
    for section in (IslandConfig, type(config.placement), type(config.run.sync)):
        for field in dataclasses.fields(section):
            assert source.count(" ".join(field.metadata["help"].split())) == 1, field


def test_text_with_quotes_and_a_tuple_of_one_come_back(tmp_path):
    island = IslandConfig(stands_for='it\'s a "v6e" \\ 16')
    config = Config(islands={"it's": island}).replace("faults", ("it's@1:kill",))
    file = tmp_path / "mine.py"
    file.write_text(render(config, "Mine."))
    assert read_config(file) == config


def test_it_begins_like_another_config_and_leaves_files_alone(tmp_path, capsys):
    file = tmp_path / "mine.py"
    assert cli.main(["init", str(file.with_suffix("")), "--like", "mixed_toy"]) == 0
    assert read_config(file) == read_config("mixed_toy")
    assert f"diloco run {file}" in capsys.readouterr().err
    before = file.read_text()
    assert cli.main(["init", str(file)]) == 2
    assert "give another name" in capsys.readouterr().err
    assert file.read_text() == before
    assert cli.main(["init", "."]) == cli.main(["init", ".."]) == 2
    assert "'..' is no .py file" in capsys.readouterr().err


def test_a_file_of_that_name_goes_before_the_package_and_names_are_told(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert read_config("quickstart").islands.keys() == {"v6e", "v5p-a", "v5p-b"}
    with pytest.raises(ConfigError, match=r"one of the names .*quickstart"):
        read_config("other")


def test_titles_are_those_of_the_files():
    assert loading.title_of_named("quickstart").startswith("The first run")
    assert loading.find_named("../configs/quickstart") is None
