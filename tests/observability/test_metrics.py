"""Lines and curves hold the same numbers."""

import json

import pytest

from diloco_jax.observability.metrics import Metrics

ISLAND = {
    "kind": "island",
    "time": 5.0,
    "island": "a",
    "phase": "training",
    "step": 3,
    "loss": 2.5,
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
    "seconds": 0.1,
}


def test_lines_and_curves(tmp_path):
    metrics = Metrics(tmp_path)
    metrics.append(ISLAND)
    metrics.append(MERGE)
    metrics.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [ISLAND, MERGE]
    curves = points(tmp_path / "tensorboard")
    assert curves["island/loss/a"] == (3, 5.0, 2.5)
    assert curves["merge/norm/fragment-1"] == (4, 6.0, 0.25)
    assert "island/eval_loss/a" not in curves, "there was none"


def points(folder):
    """(step, time, value) of every curve's only point."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.glob("events.*")
    raw, found = path.read_bytes(), {}
    while raw:
        length = int.from_bytes(raw[:8], "little")
        event = Event.FromString(raw[12 : 12 + length])
        raw = raw[12 + length + 4 :]
        for value in event.summary.value:
            number = pytest.approx(value.simple_value)
            found[value.tag] = (event.step, event.wall_time, number)
    return found
