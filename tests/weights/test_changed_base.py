"""Adapters are merged with the weights that they were trained on, or with none."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest
from begin_support import FAMILIES, begun
from safetensors.numpy import load_file, save_file
from test_adapted import moved, run_of

from diloco_jax import cli
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.resolving import resolve
from diloco_jax.models.build import build
from diloco_jax.models.model import Frozen
from diloco_jax.weights import adapted, tensor_files
from diloco_jax.weights.export import export
from diloco_jax.weights.first import first_params
from diloco_jax.workdir import read_config


@pytest.fixture
def adapting(tmp_path):
    """A run that adapts a folder of its own."""
    base = tmp_path / "base"
    shutil.copytree(FAMILIES / "smollm2", base)
    run = run_of("smollm2")
    model = dataclasses.replace(run.model, weights=f"hf:{base}")
    run = resolve(Config(run=dataclasses.replace(run, model=model))).run
    return run, base, moved(first_params(run, build(run)), 1)


def changed(base):
    found = load_file(base / tensor_files.SINGLE)
    found["model.norm.weight"] = -found["model.norm.weight"]
    save_file(found, base / tensor_files.SINGLE)


@pytest.mark.parametrize("read", ["merged", "merged_leaves"])
def test_a_base_that_changed_is_merged_with_nothing(read, adapting):
    run, base, adapters = adapting
    whole = adapted.merged(run, adapters)
    changed(base)
    with pytest.raises(ConfigError, match=rf"{run.model.frozen_digest} .* have \w+"):
        list(getattr(adapted, read)(run, adapters))
    changed(base)  # Back again.
    again = adapted.merged(run, adapters)
    jax.tree.map(np.testing.assert_array_equal, again, whole)


def test_a_run_that_noted_no_digest_is_not_compared(adapting):
    run, base, adapters = adapting
    model = dataclasses.replace(run.model, frozen_digest="")
    changed(base)
    adapted.merged(dataclasses.replace(run, model=model), adapters)


def test_commands_that_merge_say_that_the_base_is_another(config, tmp_path, capsys):
    base = tmp_path / "base"
    shutil.copytree(FAMILIES / "smollm2", base)
    model = dataclasses.replace(config.run.model, lora_rank=2, lora_alpha=4.0)
    run = dataclasses.replace(config.run, model=model)
    workdir = begun(
        dataclasses.replace(config, run=run), f"hf:{base}", tmp_path / "run"
    )
    digest = read_config(workdir).run.model.frozen_digest
    changed(base)
    out = tmp_path / "out"
    task = tmp_path / "t.json"
    task.write_text('[{"question": "a", "choices": ["b", "c"], "answer": "b"}]')
    for command in (
        ["export", str(workdir), str(out), "--merged"],
        ["generate", str(workdir), "--prompt", "a"],
        ["eval", str(workdir), "--tasks", str(task)],
    ):
        assert cli.main(command) == 2
        assert f"model.frozen_digest = {digest}" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))
    assert export(read_config(workdir), workdir, out)[0]  # The adapters alone.


def test_frozen_parameters_are_required_by_one_function():
    frozen = Frozen({}, {}, digest=lambda: "b" * 16)
    frozen.require("")
    frozen.require("b" * 16)
    with pytest.raises(ConfigError, match=f"{'a' * 16}.*{'b' * 16}"):
        frozen.require("a" * 16)
