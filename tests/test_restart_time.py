"""Islands last as long as a restart of their coordinator takes; how long they pause."""

import dataclasses

import pytest

from diloco_jax.config import Config, IslandConfig, LaunchConfig, Placement, RunConfig
from diloco_jax.config.placement import Deadlines
from diloco_jax.hardware.machines import (
    CONSTANTS,
    PROCESS_S,
    lasting,
    outage_seconds,
    rate_of,
    state_seconds,
)
from diloco_jax.wire.peers import Backoff

CONFIG = Config(
    run=RunConfig(),
    islands={"a": IslandConfig(batch_size=4)},
    placement=Placement(outage_budget_s=60.0),
    launch=LaunchConfig(coordinator_disk_gb=2000),
)


def test_a_restart_reads_the_state_and_decodes_publishes():
    """While it reads some it decodes others, on all cores: the longer one counts."""
    assert state_seconds(100e9, 1e9, 0, 5.7, 0.0, 1) == pytest.approx(125)
    assert state_seconds(0, 1e9, 10e9, 5.7, 0.0, 1) == pytest.approx(1.25 * 57)
    both = state_seconds(100e9, 1e9, 80e9, 5.7, 0.4, 4)
    assert both == pytest.approx(1.25 * (80 * 5.7 + 100 * 0.4) / 4)
    assert state_seconds(100e9, 1e9, 80e9, 5.7, 0.4, 16) == pytest.approx(125)


def test_a_small_model_has_the_budget_that_is_set():
    assert outage_seconds(CONFIG, 10**6) == 60
    assert lasting(CONFIG, 10**6) == CONFIG
    soon = dataclasses.replace(CONFIG, placement=Placement(outage_budget_s=0.5))
    assert outage_seconds(soon, 10**6) == 0.5


def test_every_wait_of_islands_follows_from_the_size_of_the_state():
    lasts = lasting(CONFIG, 12 * 10**9).placement
    # 144 GB of state and 72 of publishes at 700 MiB/s; 16 cores are done before.
    read_s = 216e9 / (700 * 2**20)
    decoded_s = 72 * rate_of(CONSTANTS.replay_core_seconds, "int8")
    assert (decoded_s + 216 * CONSTANTS.read_core_seconds) / 16 < read_s
    assert lasts.outage_budget_s == pytest.approx(PROCESS_S + 1.25 * read_s, rel=1e-3)
    assert lasts.patience_s == 3 * lasts.outage_budget_s
    assert lasts.alone_s == 4 * lasts.outage_budget_s


def test_a_faster_disk_is_waited_for_less():
    faster = dataclasses.replace(CONFIG, launch=LaunchConfig(coordinator_disk_gb=3000))
    assert outage_seconds(faster, 12 * 10**9) < outage_seconds(CONFIG, 12 * 10**9)


def test_all_processes_of_a_run_find_the_same():
    once = lasting(CONFIG, 12 * 10**9)
    assert lasting(once, 12 * 10**9) == once


def test_an_unknown_machine_is_no_obstacle_to_a_run():
    """Only a plan needs to know it."""
    own = dataclasses.replace(CONFIG, launch=LaunchConfig(coordinator_machine="mine"))
    assert outage_seconds(own, 12 * 10**9) > 60


DEADLINES = Deadlines(100.0)


def test_pauses_double_up_to_the_longest():
    backoff = Backoff(*DEADLINES.retries_s)
    assert [backoff.next_s() for _ in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]
    backoff.reset()
    assert backoff.next_s() == 0.5


def test_who_starts_first_does_not_wait_for_long_whatever_the_budget():
    assert Deadlines(10.0).retry_min_s == 0.1
    assert Deadlines(600.0).retry_min_s == 0.5


def test_earlier_failures_count():
    assert Backoff(*DEADLINES.retries_s, failures=2).next_s() == 2.0
    assert Backoff(*DEADLINES.retries_s, failures=1000).next_s() == 10.0


def test_a_join_has_the_time_that_its_bytes_take_on_the_slowest_link():
    assert DEADLINES.join_s(0) == DEADLINES.pin_s
    of_12b = DEADLINES.join_s(4 * 12 * 10**9) - DEADLINES.pin_s
    assert of_12b == 48e9 * 8 / 0.1e9
