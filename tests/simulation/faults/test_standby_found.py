"""Schedules that a series found, as short as they get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diloco_jax.simulation.faults.play import play
from diloco_jax.simulation.faults.schedule import from_json

SIDE_BRANCH: dict[str, Any] = {
    "islands": {
        "a": {"step_s": 0.8, "batch_size": 2, "join_s": 1.2},
        "b": {"step_s": 1.0, "join_s": 1.9},
        "c": {"step_s": 1.0, "join_s": 0.7},
    },
    "faults": [
        {
            "kind": "coordinator_crash",
            "restart": {
                "down_s": 2.38,
                "clock_s": 1092.5,
                "noticed_s": 4.0,
                "power_cut": True,
            },
            "effects": 1,
            "at_s": 0.54,
        },
        {
            "kind": "coordinator_crash",
            "restart": {"down_s": 8.17, "clock_s": 1085.6, "noticed_s": 0.0},
            "effects": 9,
            "at_s": 1.05,
        },
        {"kind": "node_stop", "part": "standby", "for_s": 0.82, "at_s": 1.69},
        {
            "kind": "node_loss",
            "part": "primary",
            "restart": {"down_s": 1.14, "clock_s": 3314.9, "noticed_s": 0.0},
            "at_s": 5.38,
        },
    ],
    "total_tokens": 1,
    "fragment_sizes": [7],
    "standby": {"copy_s": 0.1, "rates": [1.0107, 0.9955]},
    "steps_per_cycle": 3,
    "grace": 0.0,
    "max_staleness": 2,
    "outage_s": 20.0,
    "transfer_s": 0.2,
    "merge_s": 0.1,
}
ANSWER_AT_THE_END: dict[str, Any] = {
    "islands": {
        "a": {"step_s": 0.8, "batch_size": 2, "join_s": 2.0, "lead": 2},
        "b": {"step_s": 2.5, "batch_size": 2, "join_s": 0.1, "lead": 2},
        "c": {"step_s": 2.5, "batch_size": 3, "join_s": 0.4, "lead": 2},
    },
    "faults": [
        {
            "kind": "join_crash",
            "island": "b",
            "down_s": 2.09,
            "joining_s": 0.87,
            "at_s": 3.01,
        },
        {
            "kind": "coordinator_crash",
            "restart": {"down_s": 10.15, "clock_s": 6.9, "noticed_s": 0.0},
            "at_s": 18.21,
        },
        {"kind": "mandate_away", "to": "both", "for_s": 4.7, "at_s": 18.55},
        {"kind": "island_crash", "island": "b", "down_s": 1.62, "at_s": 19.53},
        {
            "kind": "coordinator_crash",
            "restart": {
                "down_s": 0.14,
                "clock_s": 6.5,
                "noticed_s": 4.0,
                "workers_live": True,
            },
            "effects": 3,
            "at_s": 20.49,
        },
        {
            "kind": "island_crash",
            "island": "b",
            "down_s": 0.71,
            "noticed": False,
            "at_s": 46.21,
        },
    ],
    "total_tokens": 1095,
    "fragment_sizes": [3],
    "workers": 2,
    "standby": {"copy_s": 0.5, "rates": [1.0159, 1.0005]},
    "steps_per_cycle": 3,
    "overlap_steps": 1,
    "quorum": 3,
    "grace": 0.0,
    "adopt": "overwrite",
    "outage_s": 20.0,
    "transfer_s": 1.2,
    "merge_s": 0.0,
}
ANSWER_AFTER_A_GATHERING: dict[str, Any] = {
    "islands": {
        "a": {"step_s": 1.5, "batch_size": 2, "join_s": 2.0, "lead": 2},
        "b": {"step_s": 1.0, "batch_size": 3, "join_s": 0.8, "lead": 2},
        "c": {"step_s": 2.5, "batch_size": 3, "join_s": 0.4},
        "d": {"step_s": 2.5, "join_s": 0.9},
    },
    "faults": [
        {
            "kind": "load_crash",
            "down_s": 1.06,
            "loading_s": 4.6,
            "restart": {"down_s": 6.77, "clock_s": 937.2, "noticed_s": 0.0},
            "at_s": 9.01,
        },
        {
            "kind": "island_crash",
            "island": "c",
            "down_s": 4.57,
            "lingers": True,
            "at_s": 9.56,
        },
        {
            "kind": "coordinator_crash",
            "restart": {"down_s": 8.49, "clock_s": 1676.7, "noticed_s": 4.0},
            "effects": 7,
            "at_s": 11.92,
        },
        {"kind": "island_crash", "island": "c", "down_s": 0.42, "at_s": 41.68},
    ],
    "total_tokens": 1188,
    "fragment_sizes": [5, 7, 8],
    "standby": {"copy_s": 3.0, "load_s": 4.0, "rates": [1.0126, 0.9891]},
    "steps_per_cycle": 6,
    "grace": 0.0,
    "outage_s": 110.0,
    "transfer_s": 0.2,
    "merge_s": 0.8,
}

NEVER_TOLD: dict[str, Any] = {
    "islands": {
        "a": {"step_s": 1.5, "batch_size": 2, "join_s": 1.3, "lead": 2},
        "b": {"step_s": 0.8, "batch_size": 2, "join_s": 1.4, "lead": 2},
        "c": {"step_s": 1.5, "batch_size": 2, "join_s": 0.3},
    },
    "faults": [
        {
            "kind": "node_loss",
            "part": "primary",
            "restart": {"down_s": 5.87, "clock_s": 3.1, "noticed_s": 0.0},
            "renamed": True,
            "at_s": 3.79,
        },
        {
            "kind": "disk_failure",
            "restart": {
                "down_s": 0.13,
                "clock_s": 3.2,
                "noticed_s": 4.0,
                "power_cut": True,
            },
            "appends": 1,
            "written": True,
            "at_s": 5.48,
        },
        {"kind": "leave", "island": "b", "away_s": 1.55, "notice_s": 0.0, "at_s": 5.69},
        {"kind": "standby_crash", "down_s": 4.0, "at_s": 6.28},
        {
            "kind": "coordinator_crash",
            "restart": {
                "down_s": 6.89,
                "clock_s": 1.0,
                "noticed_s": 4.0,
                "power_cut": True,
            },
            "effects": 10,
            "at_s": 6.99,
        },
        {
            "kind": "coordinator_crash",
            "restart": {"down_s": 10.22, "clock_s": 267.1, "noticed_s": 0.0},
            "effects": 3,
            "at_s": 8.28,
        },
        {
            "kind": "load_crash",
            "down_s": 1.41,
            "loading_s": 0.23,
            "restart": {"down_s": 5.31, "clock_s": 2314.8, "noticed_s": 0.0},
            "at_s": 9.25,
        },
        {"kind": "mandate_away", "to": "primary", "for_s": 8.09, "at_s": 11.39},
    ],
    "total_tokens": 704,
    "fragment_sizes": [2],
    "workers": 3,
    "standby": {
        "copy_s": 0.5,
        "load_s": 0.3,
        "rates": [0.9885, 0.9909],
        "workers_apart": True,
        "unix_ahead_s": [0.0, 0.0],
    },
    "steps_per_cycle": 6,
    "overlap_steps": 1,
    "grace": 0.0,
    "outage_s": 125.0,
    "transfer_s": 0.4,
    "merge_s": 0.1,
}

STEP_UNDER_WAY: dict[str, Any] = {
    "islands": {
        "b": {"step_s": 2.5, "batch_size": 2, "join_s": 0.1},
        "c": {"step_s": 1.5, "join_s": 1.4},
    },
    "faults": [
        {
            "kind": "torn_write",
            "restart": {"down_s": 0.14, "clock_s": 107.0, "noticed_s": 4.0},
            "written_share": 0.38,
            "at_s": 2.54,
        },
        {"kind": "replacement", "island": "b", "at_s": 5.69},
        {
            "kind": "node_loss",
            "part": "primary",
            "restart": {"down_s": 3.7, "clock_s": 954.5, "noticed_s": 0.0},
            "at_s": 6.9,
        },
        {
            "kind": "coordinator_crash",
            "restart": {"down_s": 9.43, "clock_s": 2009.5, "noticed_s": 4.0},
            "effects": 2,
            "at_s": 9.65,
        },
    ],
    "total_tokens": 145,
    "fragment_sizes": [1, 8],
    "standby": {"copy_s": 0.1, "rates": [0.9884, 1.0065]},
    "steps_per_cycle": 5,
    "overlap_steps": 1,
    "grace": 0.0,
    "max_staleness": 2,
    "outage_s": 110.0,
    "transfer_s": 0.1,
    "merge_s": 0.1,
}

REMOVED_MANDATE: dict[str, Any] = {
    "islands": {
        "b": {"step_s": 1.0, "join_s": 0.4},
        "c": {"step_s": 0.8, "join_s": 0.5},
        "d": {"step_s": 1.5, "batch_size": 3, "join_s": 1.5},
    },
    "faults": [
        {
            "kind": "coordinator_crash",
            "restart": {"down_s": 4.79, "clock_s": 1832.4, "noticed_s": 0.0},
            "effects": 11,
            "at_s": 3.35,
        },
        {
            "kind": "load_crash",
            "down_s": 1.02,
            "loading_s": 2.16,
            "restart": {"down_s": 9.01, "clock_s": 3430.8, "noticed_s": 0.0},
            "at_s": 4.22,
        },
        {
            "kind": "coordinator_crash",
            "restart": {"down_s": 11.39, "clock_s": 0.6, "noticed_s": 4.0},
            "at_s": 5.42,
        },
        {
            "kind": "coordinator_crash",
            "restart": {
                "down_s": 6.4,
                "clock_s": 6.8,
                "noticed_s": 4.0,
                "power_cut": True,
            },
            "at_s": 8.12,
        },
        {
            "kind": "worker_cut",
            "worker": 2,
            "to": "primary",
            "for_s": 24.06,
            "at_s": 11.36,
        },
        {"kind": "node_stop", "part": "primary", "for_s": 19.02, "at_s": 21.83},
    ],
    "total_tokens": 1,
    "fragment_sizes": [9],
    "workers": 3,
    "standby": {
        "copy_s": 0.1,
        "load_s": 4.0,
        "rates": [1.0092, 1.0162],
        "workers_apart": True,
        "unix_ahead_s": [653432.0, 746219.0],
    },
    "steps_per_cycle": 6,
    "overlap_steps": 1,
    "grace": 0.0,
    "outage_s": 20.0,
    "transfer_s": 0.2,
    "merge_s": 0.1,
}


@pytest.mark.parametrize(
    "found",
    [
        # A person goes back to the log that led last, not to a longer side branch.
        pytest.param(SIDE_BRANCH, id="seed 504219"),
        # What a late island is told waits for the standby as both coordinators end.
        pytest.param(ANSWER_AT_THE_END, id="seed 504993"),
        pytest.param(ANSWER_AFTER_A_GATHERING, id="seed 501154"),
        # Data is granted again, since a lead died before it told of the grant.
        pytest.param(NEVER_TOLD, id="seed 1202603"),
        # An older process of an island is in the new term before the one that counts.
        pytest.param(STEP_UNDER_WAY, id="seed 2100183"),
        # Workers obey who takes over after a person has removed the mandate.
        pytest.param(REMOVED_MANDATE, id="seed 2101452"),
    ],
)
def test_the_schedule_violates_nothing(found: dict[str, Any]) -> None:
    assert play(from_json(json.dumps(found))).wrong is None
