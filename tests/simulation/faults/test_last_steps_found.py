"""Schedules in which the end of a run cost an island its last steps, as short as they
get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_jax.simulation.faults.play import play
from diloco_jax.simulation.faults.schedule import from_json

WORKER_BACK_AMID_EFFECTS: dict[str, Any] = {
    "islands": {
        "a": {"step_s": 1.0, "join_s": 0.1, "lead": 2},
        "c": {"step_s": 1.0, "join_s": 0.4},
    },
    "faults": [
        {
            "kind": "join_crash",
            "island": "a",
            "down_s": 2.2,
            "joining_s": 0.39,
            "at_s": 0.43,
        },
        {
            "kind": "coordinator_crash",
            "restart": {"down_s": 3.76, "clock_s": 1570.7, "noticed_s": 0.0},
            "effects": 8,
            "at_s": 1.32,
        },
        {
            "kind": "worker_crash",
            "worker": 1,
            "down_s": 0.14,
            "noticed_s": 0.0,
            "effects": 7,
            "at_s": 3.83,
        },
        {
            "kind": "coordinator_crash",
            "restart": {"down_s": 11.02, "clock_s": 2831.0, "noticed_s": 0.0},
            "effects": 3,
            "at_s": 6.74,
        },
        {
            "kind": "disk_failure",
            "restart": {"down_s": 1.93, "clock_s": 2.0, "noticed_s": 4.0},
            "appends": 2,
            "written": True,
            "at_s": 7.14,
        },
        {
            "kind": "coordinator_crash",
            "restart": {"down_s": 2.48, "clock_s": 1868.1, "noticed_s": 4.0},
            "at_s": 9.13,
        },
    ],
    "total_tokens": 207,
    "fragment_sizes": [6],
    "room": 1,
    "steps_per_cycle": 3,
    "grace": 0.0,
    "max_staleness": 2,
    "outage_s": 110.0,
    "transfer_s": 0.4,
    "merge_s": 0.1,
}
ENDS_BEFORE_ALL_ARE_IN_THE_TERM: dict[str, Any] = {
    "islands": {
        "a": {"step_s": 0.8, "batch_size": 2, "join_s": 1.3},
        "b": {"step_s": 0.8, "batch_size": 2, "join_s": 0.5},
        "c": {"step_s": 2.5, "batch_size": 2, "join_s": 0.8},
    },
    "faults": [
        {
            "kind": "join_crash",
            "island": "c",
            "down_s": 2.05,
            "joining_s": 1.92,
            "at_s": 2.33,
        },
        {
            "kind": "disk_lost",
            "restart": {"down_s": 0.16, "clock_s": 4.8, "noticed_s": 0.0},
            "at_s": 5.76,
        },
        {
            "kind": "worker_crash",
            "worker": 0,
            "down_s": 0.13,
            "noticed_s": 0.3,
            "effects": 7,
            "at_s": 8.66,
        },
        {"kind": "delay", "island": "a", "for_s": 0.91, "late_s": 1.2, "at_s": 15.24},
    ],
    "total_tokens": 188,
    "fragment_sizes": [2, 1],
    "grace": 0.0,
    "adopt": "overwrite",
    "outage_s": 20.0,
    "transfer_s": 0.4,
    "merge_s": 0.1,
}


@pytest.mark.parametrize(
    "found", [WORKER_BACK_AMID_EFFECTS, ENDS_BEFORE_ALL_ARE_IN_THE_TERM]
)
def test_the_end_costs_nobody_its_steps(found: dict[str, Any]) -> None:
    assert play(from_json(json.dumps(found))).wrong is None
