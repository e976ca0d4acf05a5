"""Islands last as long as a restart of their coordinator takes."""

import dataclasses

import pytest

from diloco_jax.config import Config, IslandConfig, LaunchConfig, Placement, RunConfig
from diloco_jax.restart_time import (
    PROCESS_S,
    disk_bytes_per_s,
    lasting,
    outage_seconds,
    restart_seconds,
)

CONFIG = Config(
    run=RunConfig(),
    islands={"a": IslandConfig(batch_size=4)},
    placement=Placement(outage_budget_s=60.0),
    launch=LaunchConfig(coordinator_disk_gb=2000),
)


def test_a_restart_reads_the_state_and_decodes_publishes():
    alone = restart_seconds(0, 0, 1e9)
    assert alone == PROCESS_S
    assert restart_seconds(100e9, 0, 1e9) - alone == pytest.approx(100)
    assert restart_seconds(0, 10e9, 1e9) - alone == pytest.approx(57)


def test_a_small_model_has_the_budget_that_is_set():
    assert outage_seconds(CONFIG, 10**6) == 60
    assert lasting(CONFIG, 10**6) == CONFIG
    soon = dataclasses.replace(CONFIG, placement=Placement(outage_budget_s=0.5))
    assert outage_seconds(soon, 10**6) == 0.5


def test_every_wait_of_islands_follows_from_the_size_of_the_state():
    lasts = lasting(CONFIG, 12 * 10**9).placement
    # 144 GB of state and 72 of publishes at 700 MB/s, 72e9 parameters decoded.
    assert lasts.outage_budget_s == pytest.approx(216e9 / 700e6 + 410, abs=1)
    assert lasts.patience_s == 3 * lasts.outage_budget_s
    assert lasts.alone_s == 4 * lasts.outage_budget_s


def test_a_faster_disk_is_waited_for_less():
    faster = dataclasses.replace(CONFIG, launch=LaunchConfig(coordinator_disk_gb=3000))
    assert disk_bytes_per_s(3000) > disk_bytes_per_s(2000)
    assert outage_seconds(faster, 12 * 10**9) < outage_seconds(CONFIG, 12 * 10**9)


def test_all_processes_of_a_run_find_the_same():
    once = lasting(CONFIG, 12 * 10**9)
    assert lasting(once, 12 * 10**9) == once
