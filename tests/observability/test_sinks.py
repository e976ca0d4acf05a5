"""Curves go to every sink that is named."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from test_metrics import ISLAND, MERGE, MODEL

from diloco_jax.errors import ConfigError
from diloco_jax.observability import sinks
from diloco_jax.observability.metrics import Metrics


class Run:
    """A run of wandb: the calls that the sink makes, by their names there."""

    def __init__(self) -> None:
        self.axes: dict[str, str] = {}
        self.rows: list[dict[str, float]] = []
        self.finished = False

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any]) -> None:
        assert not self.finished
        self.rows.append(dict(data))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A module in wandb's place that keeps what is asked of it."""
    fake = types.ModuleType("wandb")
    fake.begun = []

    def init(*, project, id, name, dir, config, resume):
        fake.begun.append({"project": project, "id": id, "config": config, "dir": dir})
        assert resume == "allow"
        fake.run = Run()
        return fake.run

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


@pytest.mark.parametrize("project", ["", "mine"])
def test_wandb_gets_a_row_for_each_line_on_an_axis_of_its_own(
    tmp_path, wandb, monkeypatch, project
):
    if project:
        monkeypatch.setenv("WANDB_PROJECT", project)
    both = ("tensorboard", "wandb")
    metrics = Metrics(tmp_path, sinks=both, run_id="r1", config={"seed": 1})
    for line in (ISLAND, MERGE, MODEL, {**ISLAND, "step": 4, "loss": 2.25}):
        metrics.append(line)
    metrics.close()
    (begun,) = wandb.begun
    assert begun["id"] == "r1"
    assert begun["project"] == (project or "diloco")
    assert begun["config"] == {"seed": 1}
    assert begun["dir"] == str(tmp_path)
    first, merge, model, second = wandb.run.rows
    assert first["island/step/a"] == 3
    assert first["island/loss/a"] == 2.5
    assert "island/eval_loss/a" not in first, "there was none"
    assert merge["merge/step/fragment-1"] == 4
    assert model == {"merged_model/step/by-cycle": 12} | {
        "merged_model/eval_loss/by-cycle": 2.25
    }
    assert (second["island/step/a"], second["island/loss/a"]) == (4, 2.25)
    assert wandb.run.axes["island/loss/a"] == "island/step/a"
    assert wandb.run.axes["merge/norm/fragment-1"] == "merge/step/fragment-1"
    assert wandb.run.finished
    assert list((tmp_path / "tensorboard").iterdir()), "the other one has them too"


def test_no_sink_is_no_sink(tmp_path):
    metrics = Metrics(tmp_path, sinks=())
    metrics.append(ISLAND)
    metrics.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_sink_whose_package_is_missing_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'diloco-jax\[wandb\]'"):
        sinks.require(("tensorboard", "wandb"))
