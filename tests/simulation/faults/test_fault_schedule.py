"""Schedules are data: written as JSON, read back, refused when they are none."""

import json

import pytest

from diloco_jax.config import ConfigError
from diloco_jax.simulation.faults.draw import draw
from diloco_jax.simulation.faults.schedule import from_json


@pytest.mark.parametrize("seed", range(50))
def test_json_brings_a_schedule_back(seed: int) -> None:
    schedule = draw(seed)
    assert from_json(schedule.json()) == schedule


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quorum": 7}, "quorum 7 and . islands"),
        ({"fault": []}, "unknown field `fault`"),
        ({"faults": [{"kind": "flood", "at_s": 1}]}, "flood"),
        ({"faults": [{"kind": "unfit", "at_s": 1, "island": "z"}]}, r"\['z'\]"),
    ],
)
def test_what_is_no_schedule_is_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        from_json(json.dumps({**json.loads(draw(1).json()), **change}))
