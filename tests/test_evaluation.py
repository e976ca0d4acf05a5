from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from diloco_jax import baseline, checkpoint, evaluation, files, run_files
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    OuterConfig,
    RunConfig,
)
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator.snapshots import fragment_path, state_path
from diloco_jax.island.loop import Evaluation
from diloco_jax.models.build import build, build_plan
from diloco_jax.protocol.messages import Version


@pytest.mark.parametrize(
    "judge",
    [lambda config: evaluation.whole_validation(config, None, None), baseline.run],
    ids=["evaluation", "baseline"],
)
def test_a_loss_on_other_text_than_the_runs_is_no_result(judge, tmp_path) -> None:
    (tmp_path / "a.txt").write_text("other text " * 100)
    data = DataConfig(paths=(str(tmp_path),), digest="0" * 16)
    config = Config(
        run=RunConfig(data=data, sequence_length=16),
        islands={"a": IslandConfig(batch_size=1)},
    )
    with pytest.raises(ConfigError, match=r"data.digest = 0000.*--data.paths"):
        judge(config)


def test_what_is_not_finite_is_null_in_json() -> None:
    diverged = Evaluation(loss=math.nan, bits_per_byte=math.inf)
    assert set(evaluation.as_json(diverged).values()) == {None}


def test_parameters_of_another_model_are_refused(tmp_path) -> None:
    config = Config(islands={"a": IslandConfig()})
    write_config_json(config, tmp_path / run_files.CONFIG)
    folder = checkpoint.snapshots_folder(config.placement, tmp_path)
    folder.mkdir(parents=True)
    files.write_sealed(state_path(folder, 2), {"plan": "abc"}, [])
    wanted = r"checkpoint 2 in .* does not fit: .* here, abc there; .* Bring the code"
    with pytest.raises(ConfigError, match=wanted):
        evaluation.load_params(tmp_path)


def a_run(workdir: Path, **facts: Any) -> Config:
    """A workdir with a snapshot of the state of these facts."""
    outer = OuterConfig(optimizer="nesterov", learning_rate=0.5, momentum=0.5)
    config = Config(run=RunConfig(outer=outer), islands={"a": IslandConfig()})
    write_config_json(config, workdir / run_files.CONFIG)
    folder = checkpoint.snapshots_folder(config.placement, workdir)
    folder.mkdir(parents=True)
    plan = build_plan(config.run, build(config.run))
    files.write_sealed(state_path(folder, 2), {"plan": plan.digest(), **facts}, [])
    return config


def test_a_fragment_that_was_lost_with_a_disk_is_named(tmp_path) -> None:
    a_run(tmp_path)
    with pytest.raises(ConfigError, match=r"no snapshot of fragments \[0, .*lost its"):
        evaluation.load_params(tmp_path)


def test_a_fragment_that_is_not_as_it_was_at_the_end_is_named(tmp_path) -> None:
    fragments = RunConfig().sync.fragments
    last = [[1, 3]] * fragments
    state = {"phase": "done", "fragments": [{"version": v} for v in last]}
    config = a_run(tmp_path, state=state)
    folder = checkpoint.snapshots_folder(config.placement, tmp_path)
    for fragment in range(fragments):
        version = Version(1, 3 if fragment else 2)
        path = fragment_path(folder, fragment, version)
        path.parent.mkdir()
        files.write_sealed(path, {}, [])
    (tmp_path / run_files.KEPT / "cycle-000002").mkdir(parents=True)
    behind = r"has version \(1, 2\) of fragment 0, and the run ended with \(1, 3\)"
    remedy = r"start the coordinator again, .* a kept cycle \(there are: 2\), or bring "
    with pytest.raises(ConfigError, match=f"{behind}: {remedy}"):
        evaluation.load_params(tmp_path)
