"""Snapshots come back whole, are of this run, and may fail without harm."""

import dataclasses
import logging
import math
import threading

import msgspec
import numpy as np
import pytest
from coordinator_support import AXES, PIN_S, SHAPES
from etils import epath

from diloco_jax.checkpoint import whose
from diloco_jax.config import ConfigError, Placement
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.coordinator.snapshots import (
    Snapshots,
    flat,
    state_path,
    states,
    versions,
)
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.protocol.coordinator.state import initial
from diloco_jax.protocol.values import Version
from diloco_jax.sealed import read_header

PLACEMENT = Placement(snapshot_every_s=10.0)


@pytest.fixture
def folder(tmp_path):
    return epath.Path(tmp_path / "snapshots")


@pytest.fixture
def opened(run, store, folder):
    def open_as(run_id, run=run, plan=store.plan, placement=PLACEMENT):
        policy = policy_config(run, placement, run_id, plan.sizes)
        return Snapshots(folder, placement, policy, whose(run, run_id, plan))

    return open_as


@pytest.fixture
def state(run, store):
    return initial(policy_config(run, PLACEMENT, "r", store.plan.sizes))


def test_arrays_and_state_come_back(opened, store, state):
    opened("r").save_first(3, state, store.arrays)
    again = opened("r")
    assert again.newest() == 3
    assert again.load_state(lambda number: False) == (3, state)
    for fragment in range(2):
        version, found = again.load_fragment(
            fragment, Version(1, 9), store.like(fragment)
        )
        assert version == Version()
        ours, theirs = flat(store.arrays(fragment)), flat(found)
        assert all(map(np.array_equal, ours, theirs))


@pytest.mark.parametrize("kept", [1, 2])
def test_log_and_publishes_are_cut_off_for_the_oldest_to_be_kept(
    opened, store, state, folder, kept
):
    placement = dataclasses.replace(PLACEMENT, snapshots_kept=kept)
    snapshots = opened("r", placement=placement)
    snapshots.save_first(3, state, store.arrays)
    for number in (4, 5):
        snapshots.save_state(number, state)
        snapshots.save_fragment(1, Version(1, number), store.arrays(1))
    assert states(folder) == [4, 5][-kept:]
    assert snapshots.oldest() == states(folder)[0]
    assert versions(folder, 1) == [Version(1, number) for number in (4, 5)][-kept:]
    assert snapshots.oldest_of(1) == versions(folder, 1)[0]
    assert versions(folder, 0) == [Version()]


def test_an_old_one_goes_once_the_new_one_is_on_disk(
    opened, store, state, folder, monkeypatch
):
    placement = dataclasses.replace(PLACEMENT, snapshots_kept=1)
    snapshots = opened("r", placement=placement)
    snapshots.save_first(3, state, store.arrays)
    there = []
    monkeypatch.setattr(
        "diloco_jax.sealed.sync_folder", lambda _: there.append(versions(folder, 0))
    )
    snapshots.save_fragment(0, Version(1, 1), store.arrays(0))
    assert there == [[Version(), Version(1, 1)]]


def test_where_nothing_can_be_removed_only_the_newest_count(
    opened, store, state, monkeypatch
):
    snapshots = opened("r")
    snapshots.save_first(3, state, store.arrays)
    monkeypatch.setattr(Snapshots, "_remove", lambda self, path: None)
    for number in (4, 5):
        snapshots.save_state(number, state)
    assert (opened("r").newest(), opened("r").oldest()) == (5, 4)


def test_a_new_term_leaves_nothing_of_the_old_one(opened, store, state, folder):
    snapshots = opened("r")
    snapshots.save_first(3, state, store.arrays)
    snapshots.save_fragment(0, Version(2, 7), store.arrays(0))
    opened("r").save_first(4, state, store.arrays)
    assert versions(folder, 0) == [Version()]


def test_it_says_how_far_its_parameters_have_come(opened, state, folder):
    fragment = msgspec.structs.replace(state.fragments[0], merges=7)
    state = msgspec.structs.replace(
        state, carried_progress=500, fragments=(fragment, *state.fragments[1:])
    )
    opened("r").save_state(3, state)
    facts = read_header(state_path(folder, 3))
    assert (facts["merges"], facts["tokens"]) == (7, 500)


def test_those_of_another_run_or_config_are_refused(opened, run, store, state):
    def load(snapshots):
        snapshots.load_fragment(0, Version(), store.like(0))

    opened("r").save_first(3, state, store.arrays)
    with pytest.raises(ConfigError, match="of run r, this is run other"):
        opened("other").load_state(lambda number: False)
    with pytest.raises(ConfigError, match="of run r, this is run other"):
        load(opened("other"))
    with pytest.raises(ConfigError, match="seed: 5 here, 0 there"):
        load(opened("r", dataclasses.replace(run, seed=5)))
    other = plan_fragments(SHAPES, AXES, 2, "tensor")
    with pytest.raises(ConfigError, match="does not fit: the model's"):
        load(opened("r", plan=other))


def test_fragments_have_turns_and_only_what_changed_is_written(opened, store, state):
    snapshots = opened("r")
    snapshots.save_first(3, state, store.arrays)
    assert snapshots.unsaved([Version(), Version()]) == []
    assert snapshots.unsaved([Version(1, 1), Version(1, 1)]) == [0, 1]
    snapshots.took_turn(0)
    assert snapshots.unsaved([Version(1, 1), Version(1, 1)]) == [1, 0]
    assert snapshots.unsaved([Version(1, 1), Version()]) == [0]


def test_a_round_is_spread_over_the_fragments_and_leaves_the_disk_time(
    opened, monkeypatch
):
    snapshots, clock = opened("r"), [50.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    snapshots.write(1000.0, [])
    snapshots.wait(lambda: PIN_S)
    assert (snapshots.due(1004.9), snapshots.due(1005.0)) == (False, True)

    def slow():
        clock[0] += 3.0

    snapshots.write(2000.0, [slow, slow])
    snapshots.wait(lambda: PIN_S)
    assert (snapshots.due(2023.9), snapshots.due(2024.0)) == (False, True)


def test_a_failure_is_told_and_the_next_one_is_due_in_time(opened, tmp_path, caplog):
    def full():
        raise OSError("no space left on device")

    snapshots = opened("r")
    assert snapshots.due(math.inf)
    with caplog.at_level(logging.ERROR):
        snapshots.write(1000.0, [full])
        snapshots.wait(lambda: PIN_S)
    assert "the log keeps what it holds" in caplog.text
    assert f"{tmp_path}/snapshots" in caplog.text
    assert "no space left on device" in caplog.text
    assert (snapshots.due(1009.0), snapshots.due(1010.0)) == (False, True)
    (alert,) = snapshots.alerts(1010.0)
    assert "no space left on device" in alert
    assert "the record log grows" in alert
    snapshots.write(1010.0, [])
    snapshots.wait(lambda: PIN_S)
    assert snapshots.alerts(1010.0) == []


def test_one_that_hangs_is_neither_joined_by_another_nor_waited_for(opened):
    hangs = threading.Event()
    snapshots = opened("r")
    snapshots.write(1000.0, [lambda: hangs.wait(PIN_S) and None])
    assert not snapshots.wait(lambda: 0.01)
    assert not snapshots.due(math.inf)
    assert snapshots.alerts(1100.0) == []
    (alert,) = snapshots.alerts(1101.0)
    assert "is not written after 101 s" in alert
    hangs.set()
    assert snapshots.wait(lambda: PIN_S)
