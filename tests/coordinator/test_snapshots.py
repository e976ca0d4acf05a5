"""Snapshots come back whole, are of this run, and may fail without harm."""

import dataclasses
import logging
import math
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from coordinator_support import AXES, PIN_S, SHAPES, loaded
from etils import epath

from diloco_jax.checkpoint import whose
from diloco_jax.config import ConfigError, Placement
from diloco_jax.coordinator.holding.fragment_snapshots import FragmentSnapshots
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.coordinator.snapshots import (
    SnapshotWriter,
    StateSnapshots,
    flat,
    state_path,
    states,
    versions,
)
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.files import read_sealed_header
from diloco_jax.protocol.coordinator.state import initial
from diloco_jax.protocol.messages import Version

PLACEMENT = Placement(snapshot_every_s=10.0)


@pytest.fixture
def folder(tmp_path):
    return epath.Path(tmp_path / "snapshots")


@pytest.fixture
def opened(run, store, folder):
    """Opens the snapshots of fragments."""

    def open_as(run_id, run=run, plan=store.plan, placement=PLACEMENT):
        return FragmentSnapshots(folder, placement, range(2), whose(run, run_id, plan))

    return open_as


@pytest.fixture
def opened_states(run, store, folder):
    """Opens the snapshots of the state."""

    def open_as(run_id, placement=PLACEMENT):
        policy = policy_config(run, placement, run_id, store.plan.sizes)
        return StateSnapshots(folder, placement, policy, whose(run, run_id, store.plan))

    return open_as


@pytest.fixture
def writer(folder):
    """In a round of 10 s two fragments have their turns."""
    return SnapshotWriter(folder, 10.0, 2, "record log")


def save_first(snapshots, store):
    for fragment in range(2):
        snapshots.save_first(fragment, Version(), store.arrays(fragment))


def unsaved(snapshots, *current):
    """Fragments that would be written at these versions, in their order."""
    return snapshots._unsaved(SimpleNamespace(versions=lambda: current))


@pytest.fixture
def state(run, store):
    return initial(policy_config(run, PLACEMENT, "r", store.plan.sizes))


def test_arrays_and_state_come_back(opened, opened_states, store, state):
    save_first(opened("r"), store)
    opened_states("r").save(3, state)
    assert opened_states("r").newest() == 3
    assert opened_states("r").load(lambda number: False) == (3, state)
    for fragment in range(2):
        version, found = loaded(opened("r"), store, fragment, Version(1, 9))
        assert version == Version()
        ours, theirs = flat(store.arrays(fragment)), flat(found)
        assert all(map(np.array_equal, ours, theirs))


def test_one_of_a_version_that_never_was_goes_before_another_has_its_number(
    opened, store, folder
):
    snapshots = opened("r")
    save_first(snapshots, store)
    for number in (3, 5):
        snapshots.save(0, Version(1, number), store.arrays(0))
    again = opened("r")
    assert again.find(0, Version(1, 4)) == Version(1, 3)
    assert len(versions(folder, 0)) == 2, "who only looks removes nothing"
    assert loaded(again, store, 0, Version(1, 4))[0] == Version(1, 3)
    assert versions(folder, 0) == [Version(1, 3)]
    assert unsaved(again, Version(1, 4), Version()) == [0]
    again.save(0, Version(1, 4), store.arrays(0))
    assert versions(folder, 0) == [Version(1, 3), Version(1, 4)]


@pytest.mark.parametrize("kept", [1, 2])
def test_log_and_publishes_are_cut_off_for_the_oldest_to_be_kept(
    opened, opened_states, store, state, folder, kept
):
    placement = dataclasses.replace(PLACEMENT, snapshots_kept=kept)
    snapshots = opened("r", placement=placement)
    own = opened_states("r", placement)
    save_first(snapshots, store)
    for number in (3, 4, 5):
        own.save(number, state)
        snapshots.save(1, Version(1, number), store.arrays(1))
    assert states(folder) == [4, 5][-kept:]
    assert own.oldest() == states(folder)[0]
    assert versions(folder, 1) == [Version(1, number) for number in (4, 5)][-kept:]
    assert versions(folder, 0) == [Version()]


def test_an_old_one_goes_once_the_new_one_is_on_disk(
    opened, store, folder, monkeypatch
):
    placement = dataclasses.replace(PLACEMENT, snapshots_kept=1)
    snapshots = opened("r", placement=placement)
    save_first(snapshots, store)
    there = []
    monkeypatch.setattr(
        "diloco_jax.files.sync_path", lambda _: there.append(versions(folder, 0))
    )
    snapshots.save(0, Version(1, 1), store.arrays(0))
    assert there == [[Version()], [Version(), Version(1, 1)]]


def test_where_nothing_can_be_removed_only_the_newest_count(
    opened_states, state, monkeypatch
):
    monkeypatch.setattr(StateSnapshots, "_remove", lambda self, path: None)
    for number in (3, 4, 5):
        opened_states("r").save(number, state)
    again = opened_states("r")
    assert (again.newest(), again.oldest()) == (5, 4)


def test_a_new_term_leaves_nothing_of_the_old_one(opened, store, folder):
    snapshots = opened("r")
    save_first(snapshots, store)
    snapshots.save(0, Version(2, 7), store.arrays(0))
    save_first(opened("r"), store)
    assert versions(folder, 0) == [Version()]


def test_the_last_state_is_on_the_disk_and_the_log_before_the_oldest_is_gone(
    opened_states, state
):
    numbers, gone = iter(range(1, 9)), []
    log = SimpleNamespace(rotate=lambda: next(numbers), forget=gone.append)
    states = opened_states("r")
    for number in range(1, 5):
        states.write_last(state, log)
        assert opened_states("r").newest() == number
    kept = PLACEMENT.snapshots_kept
    assert gone == [max(1, number - kept + 1) for number in range(1, 5)]


def test_it_says_how_far_its_parameters_have_come(opened_states, state, folder):
    fragment = msgspec.structs.replace(state.fragments[0], merges=7)
    state = msgspec.structs.replace(
        state, carried_progress=500, fragments=(fragment, *state.fragments[1:])
    )
    opened_states("r").save(3, state)
    facts = read_sealed_header(state_path(folder, 3))
    assert (facts["merges"], facts["tokens"]) == (7, 500)


def test_those_of_another_run_or_config_are_refused(
    opened, opened_states, run, store, state
):
    def load(snapshots):
        snapshots.find(0, Version())

    save_first(opened("r"), store)
    opened_states("r").save(3, state)
    with pytest.raises(ConfigError, match="of run r, this is run other"):
        opened_states("other").load(lambda number: False)
    with pytest.raises(ConfigError, match="of run r, this is run other"):
        load(opened("other"))
    with pytest.raises(ConfigError, match="seed: 5 here, 0 there"):
        load(opened("r", dataclasses.replace(run, seed=5)))
    other = plan_fragments(SHAPES, AXES, 2, "tensor")
    with pytest.raises(ConfigError, match="does not fit: the model's"):
        load(opened("r", plan=other))


def test_fragments_have_turns_and_only_what_changed_is_written(opened, store):
    snapshots = opened("r")
    save_first(snapshots, store)
    assert unsaved(snapshots, Version(), Version()) == []
    assert unsaved(snapshots, Version(1, 1), Version(1, 1)) == [0, 1]
    snapshots._next = 1
    assert unsaved(snapshots, Version(1, 1), Version(1, 1)) == [1, 0]
    snapshots.lost.add(1)
    assert unsaved(snapshots, Version(1, 1), Version(1, 1)) == [0]
    snapshots.lost.clear()
    assert unsaved(snapshots, Version(1, 1), Version()) == [0]


@pytest.mark.parametrize(
    ("within_s", "saved"), [(None, [0, 1]), (60.0, [0, 1]), (0.0, [])]
)
def test_the_last_ones_are_written_as_far_as_there_is_time(
    opened, store, folder, within_s, saved
):
    snapshots, forgotten, newest = opened("r"), [], Version(1, 2)
    save_first(snapshots, store)
    moved = SimpleNamespace(
        versions=lambda: [newest] * 2, current=lambda f: (newest, store.arrays(f))
    )
    publishes = SimpleNamespace(forget=lambda *through: forgotten.append(through))
    snapshots.write_last(within_s, moved, publishes)
    assert [f for f in range(2) if newest in versions(folder, f)] == saved
    assert forgotten == [(fragment, Version()) for fragment in saved]


def test_a_round_is_spread_over_the_fragments_and_leaves_the_disk_time(
    writer, monkeypatch
):
    clock = [50.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    writer.write(1000.0, lambda: None)
    writer.wait(lambda: PIN_S)
    assert (writer.due(1004.9), writer.due(1005.0)) == (False, True)

    def slow():
        clock[0] += 6.0

    writer.write(2000.0, slow)
    writer.wait(lambda: PIN_S)
    assert (writer.due(2023.9), writer.due(2024.0)) == (False, True)


def test_a_failure_is_told_and_the_next_one_is_due_in_time(writer, tmp_path, caplog):
    def full():
        raise OSError("no space left on device")

    assert writer.due(math.inf)
    with caplog.at_level(logging.ERROR):
        writer.write(1000.0, full)
        writer.wait(lambda: PIN_S)
    assert "the record log keeps what it holds" in caplog.text
    assert f"{tmp_path}/snapshots" in caplog.text
    assert "no space left on device" in caplog.text
    assert (writer.due(1009.0), writer.due(1010.0)) == (False, True)
    (alert,) = writer.alerts(1010.0)
    assert "no space left on device" in alert
    assert "the record log grows" in alert
    writer.write(1010.0, lambda: None)
    writer.wait(lambda: PIN_S)
    assert writer.alerts(1010.0) == []


def test_one_for_which_there_is_no_thread_is_told_and_comes_later(writer, monkeypatch):
    def none(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        writer.write(1000.0, lambda: None)
    (alert,) = writer.alerts(1000.0)
    assert "no snapshot was written: can't start new thread" in alert
    assert (writer.due(1004.9), writer.due(1005.0)) == (False, True)
    writer.write(1005.0, lambda: None)
    assert writer.wait(lambda: PIN_S)
    assert writer.alerts(1005.0) == []


def test_one_that_hangs_is_neither_joined_by_another_nor_waited_for(writer):
    hangs = threading.Event()
    writer.write(1000.0, lambda: hangs.wait(PIN_S) and None)
    assert not writer.wait(lambda: 0.01)
    assert not writer.due(math.inf)
    assert writer.alerts(1100.0) == []
    (alert,) = writer.alerts(1101.0)
    assert "is not written after 101 s" in alert
    hangs.set()
    assert writer.wait(lambda: PIN_S)
