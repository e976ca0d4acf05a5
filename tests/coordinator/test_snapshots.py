"""Snapshots come back whole, are of this run, and may fail without harm."""

import dataclasses
import logging
import math
import threading
import time

import jax
import msgspec
import numpy as np
import pytest
from coordinator_support import AXES, PIN_S, SHAPES, arrays, like
from etils import epath

from diloco_jax.checkpoint import open_folder, read_facts, save, whose
from diloco_jax.config import ConfigError, Placement
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.coordinator.snapshots import Snapshots, by_name
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.protocol.coordinator.state import initial

PLACEMENT = Placement(snapshot_every_s=10.0)


@pytest.fixture
def opened(run, store, tmp_path):
    made = []

    def open_as(run_id, run=run, plan=store.plan):
        folder = epath.Path(tmp_path / "snapshots")
        policy = policy_config(run, PLACEMENT, run_id, plan.sizes)
        made.append(Snapshots(folder, PLACEMENT, policy, whose(run, run_id, plan)))
        return made[-1]

    yield open_as
    for snapshots in made:
        snapshots.close()


@pytest.fixture
def state(run, store):
    return initial(policy_config(run, PLACEMENT, "r", store.plan.sizes))


def test_arrays_and_state_come_back(opened, store, state):
    opened("r").save(3, state, arrays(store))
    again = opened("r")
    assert again.newest() == 3
    found_arrays, found = again.load(3, like(store))
    assert found == state
    ours = jax.tree.leaves(arrays(store))
    theirs = jax.tree.leaves(found_arrays)
    assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_the_log_is_cut_off_for_the_oldest_that_is_to_be_kept(
    opened, store, state, tmp_path
):
    one = opened("r")
    one.save(3, state, arrays(store))
    assert one.oldest() == 3
    one.save(4, state, arrays(store))
    assert one.oldest() == 3
    # As in a bucket that lets nothing be removed.
    other = open_folder(epath.Path(tmp_path / "snapshots"), keep=9)
    save(other, 5, by_name(arrays(store)), {})
    other.close()
    assert opened("r").oldest() == 4


def test_it_says_how_far_its_parameters_have_come(opened, store, state, tmp_path):
    fragment = msgspec.structs.replace(state.fragments[0], merges=7)
    state = msgspec.structs.replace(
        state, carried_progress=500, fragments=(fragment, *state.fragments[1:])
    )
    opened("r").save(3, state, arrays(store))
    manager = open_folder(epath.Path(tmp_path / "snapshots"), keep=1, read_only=True)
    facts = read_facts(manager, 3)
    manager.close()
    assert (facts["merges"], facts["tokens"]) == (7, 500)


def test_those_of_another_run_or_config_are_refused(opened, run, store, state):
    opened("r").save(3, state, arrays(store))
    with pytest.raises(ConfigError, match="of run r, this is run other"):
        opened("other").load(3, like(store))
    with pytest.raises(ConfigError, match="seed: 5 here, 0 there"):
        opened("r", dataclasses.replace(run, seed=5)).load(3, like(store))
    other = plan_fragments(SHAPES, AXES, 2, "tensor")
    with pytest.raises(ConfigError, match=r"checkpoint 3 .* does not fit: the model's"):
        opened("r", plan=other).load(3, like(store))


def test_a_failure_is_told_and_the_next_one_is_due_in_time(opened, tmp_path, caplog):
    def full():
        raise OSError("no space left on device")

    snapshots = opened("r")
    assert snapshots.due(math.inf)
    with caplog.at_level(logging.ERROR):
        snapshots.write(1000.0, full)
        snapshots.wait(lambda: PIN_S)
    assert "the log keeps what it holds" in caplog.text
    assert f"{tmp_path}/snapshots" in caplog.text
    assert "no space left on device" in caplog.text
    assert (snapshots.due(1009.0), snapshots.due(1010.0)) == (False, True)
    (alert,) = snapshots.alerts(1010.0)
    assert "no space left on device" in alert
    assert "the record log grows" in alert
    snapshots.write(1010.0, lambda: None)
    snapshots.wait(lambda: PIN_S)
    assert snapshots.alerts(1010.0) == []


def test_one_that_hangs_is_neither_joined_by_another_nor_waited_for(opened):
    hangs = threading.Event()
    snapshots = opened("r")
    snapshots.write(1000.0, lambda: hangs.wait(PIN_S) and None)
    assert not snapshots.wait(lambda: 0.01)
    assert not snapshots.due(math.inf)
    assert snapshots.alerts(1100.0) == []
    (alert,) = snapshots.alerts(1101.0)
    assert "is not written after 101 s" in alert
    began = time.monotonic()
    snapshots.close()
    assert time.monotonic() - began < PIN_S / 2
    hangs.set()
    assert snapshots.wait(lambda: PIN_S)
