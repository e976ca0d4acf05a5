"""Lines and curves hold the same numbers, and curves go to every sink that is named."""

from __future__ import annotations

import errno
import json
import sys
import threading
import types
from typing import Any

import pytest
from tensorboardX.event_file_writer import EventsWriter

from diloco_jax.errors import ConfigError
from diloco_jax.observability import metrics as metrics_module
from diloco_jax.observability import sinks
from diloco_jax.observability import tape as tape_module
from diloco_jax.observability.metrics import Metrics, read_metrics

LATE_S = 60.0
ISLAND = {
    "kind": "island",
    "time": 5.0,
    "island": "a",
    "phase": "training",
    "step": 3,
    "loss": 2.5,
    "loss_by_source": {"/rows/code": 2.0, "/rows/prose": None},
    "adoption_loss": 0.25,
    "eval_loss": None,
    "learning_rate": 1e-3,
    "median_step_seconds": 0.5,
    "stalled_seconds": 0.0,
    "bytes_up": 7,
    "bytes_down": 8,
}
MERGE = {
    "kind": "merge",
    "time": 6.0,
    "fragment": 1,
    "version": 4,
    "islands": ["a"],
    "tokens": 64,
    "share": 1.0,
    "norm": 0.25,
    "pairwise_cosine": 0.1,
    "cosine_to_last": None,
    "length_ratio": 1.0,
    "step_ratio": 0.4,
    "experts": {"overlap": 0.75},
    "seconds": 0.1,
}

MODEL = {
    "kind": "merged_model",
    "time": 7.0,
    "cycle": 12,
    "island": "a",
    "eval_loss": 2.25,
}


def test_lines_and_curves(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.append(ISLAND)
    metrics.append(MERGE)
    metrics.append(MODEL)
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [ISLAND, MERGE, MODEL]
    (file,) = (tmp_path / "tensorboard").iterdir()
    drawn = points(file)
    assert drawn["island/loss/a"] == (3, 5.0, 2.5)
    assert drawn["island/loss_by_source/a//rows/code"] == (3, 5.0, 2.0)
    assert "island/loss_by_source/a//rows/prose" not in drawn, "there was none"
    assert drawn["merged_model/eval_loss/by-cycle"] == (12, 7.0, 2.25)
    assert drawn["merge/norm/fragment-1"] == (4, 6.0, 0.25)
    assert drawn["merge/pairwise_cosine/fragment-1"] == (4, 6.0, 0.1)
    assert drawn["merge/experts/fragment-1/overlap"] == (4, 6.0, 0.75)
    assert "island/eval_loss/a" not in drawn, "there was none"
    assert "merge/cosine_to_last/fragment-1" not in drawn, "there was none"


def numbered(numbers):
    return [{**MERGE, "version": n} for n in numbers]


def test_a_file_that_cannot_be_begun_holds_up_nobody(tmp_path, monkeypatch):
    """The full one was put aside already; lines wait, and none is lost or doubled."""
    metrics = Metrics(tmp_path, segment_bytes=1000)
    opened, full = tape_module.Appended, [False]

    def appended(path):
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return opened(path)

    monkeypatch.setattr(tape_module, "Appended", appended)
    full[0] = True
    for line in numbered(range(10)):
        metrics.append(line)
    assert "lines wait for space" in metrics.alerts[0]
    assert 0 < len(list(read_metrics(tmp_path))) < 10
    full[0] = False
    metrics.append(*numbered([10]))
    metrics.close()
    assert list(read_metrics(tmp_path)) == numbered(range(11))


def points(path):
    """(step, time, value) of every curve's last point."""
    from tensorboardX.proto.event_pb2 import Event

    raw, found = path.read_bytes(), {}
    while raw:
        length = int.from_bytes(raw[:8], "little")
        event = Event.FromString(raw[12 : 12 + length])
        raw = raw[12 + length + 4 :]
        for value in event.summary.value:
            number = pytest.approx(value.simple_value)
            found[value.tag] = (event.step, event.wall_time, number)
    return found


def test_a_disk_that_was_full_for_a_moment_costs_points_and_holds_up_nobody(
    tmp_path, monkeypatch, caplog
):
    """The first file fails when it is flushed; a second one has what comes later."""
    flush, failed = EventsWriter.flush, threading.Event()

    def full_once(self):
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return flush(self)

    monkeypatch.setattr(EventsWriter, "flush", full_once)
    monkeypatch.setattr(metrics_module, "FLUSH_S", 0.0)
    monkeypatch.setattr(metrics_module, "RETRY_S", 0.0)
    monkeypatch.setattr(metrics_module, "CLOSE_S", LATE_S)
    metrics = Metrics(tmp_path)
    metrics.append(ISLAND)
    assert failed.wait(LATE_S)
    for step in range(100):
        metrics.append({**ISLAND, "step": step})
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 101
    assert points(max((tmp_path / "tensorboard").iterdir()))["island/loss/a"][0] == 99
    assert "No space left on device" in caplog.text


def test_a_disk_that_hangs_holds_up_nobody(tmp_path, monkeypatch, caplog):
    hang = threading.Event()
    monkeypatch.setattr(EventsWriter, "flush", lambda self: hang.wait(60))
    monkeypatch.setattr(metrics_module, "FLUSH_S", 0.0)
    monkeypatch.setattr(metrics_module, "CLOSE_S", 0.1)
    monkeypatch.setattr(metrics_module, "MOST_POINTS_WAITING", 10)
    metrics = Metrics(tmp_path)
    try:
        for _ in range(20):
            metrics.append(ISLAND)
        metrics.close()
        assert not hang.is_set()
        assert "10 points wait for tensorboard" in caplog.text
    finally:
        hang.set()


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


def test_a_sink_that_fails_is_begun_anew_and_its_first_error_is_told(
    tmp_path, wandb, monkeypatch, caplog
):
    log, failed = Run.log, threading.Event()

    def out_of_quota(run, data):
        if failed.is_set():
            return log(run, data)
        monkeypatch.setattr(run, "finish", None)  # Its end fails, too.
        failed.set()
        raise RuntimeError("no quota")

    monkeypatch.setattr(Run, "log", out_of_quota)
    monkeypatch.setattr(metrics_module, "FLUSH_S", 0.0)
    monkeypatch.setattr(metrics_module, "RETRY_S", 0.0)
    monkeypatch.setattr(metrics_module, "CLOSE_S", LATE_S)
    metrics = Metrics(tmp_path, sinks=("wandb",), run_id="r1")
    metrics.append(ISLAND)
    assert failed.wait(LATE_S)
    metrics.append({**ISLAND, "step": 4})
    metrics.close()
    assert [begun["id"] for begun in wandb.begun] == ["r1", "r1"]
    assert [row["island/step/a"] for row in wandb.run.rows] == [4]
    assert "curves in wandb are not complete (RuntimeError: no quota" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_no_sink_is_no_sink(tmp_path):
    metrics = Metrics(tmp_path, sinks=())
    metrics.append(ISLAND)
    metrics.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_sink_whose_package_is_missing_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"pip install 'diloco-jax\[wandb\]'"):
        sinks.require(("tensorboard", "wandb"))
