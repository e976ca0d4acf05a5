"""Checkpoints of an island, and their use by its next incarnation; the part of it that
a train loop keeps in its own."""

import dataclasses
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from link_support import Store
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax import checkpoint
from diloco_jax.config import (
    Config,
    ConfigError,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.core.fragments import get_piece
from diloco_jax.core.tiles import TileGrid
from diloco_jax.island import checkpoints
from diloco_jax.island.checkpoints import (
    Checkpoints,
    require_own,
    restored_state,
    saved_state,
)
from diloco_jax.island.device.build import build_exchange, build_trainer, join
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.island.world import ALONE, Hosts
from diloco_jax.models.build import build_plan
from diloco_jax.models.model import Model
from diloco_jax.protocol.messages import FIRST_VERSION, Record, Version
from diloco_jax.wire.bulk import Identity

PATIENCE_S = 60.0
BATCH = np.random.default_rng(0).integers(0, 256, (2, 17)).astype(np.int32)
FIRST, SECOND = Version(1, 0), Version(1, 1)


@pytest.fixture(scope="module")
def config():
    return Config(
        run=RunConfig(
            model=MODEL,
            sync=SyncConfig(fragments=2),
            sequence_length=SEQUENCE_LENGTH,
        ),
        islands={"a": IslandConfig(batch_size=2)},
        placement=Placement(checkpoint_every_s=0.001),
    )


@pytest.fixture(scope="module")
def parts(config):
    """Model, trainer and plan."""
    model, trainer = build_trainer(config.run, config.islands["a"])
    return model, trainer, build_plan(config.run, model)


class Life:
    """One incarnation of island a, with the model's first parameters as anchors."""

    def __init__(self, config, parts, folder, incarnation, run_id="run-1"):
        model, self.trainer, self.plan = parts
        self.exchange, _ = build_exchange(config.run, model, self.trainer)
        self.begins = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
        self.checkpoints = Checkpoints(config, "a", checkpoint.Folder(folder))
        self.replica = None
        self.checkpoints.open(
            Identity(
                run_id=run_id, island="a", incarnation=incarnation, session="session"
            ),
            self.plan,
            ALONE,
        )

    def join(self, versions):
        restored = self.checkpoints.restore(self.trainer, self.exchange, versions)
        anchors = {}
        for fragment, pieces in enumerate(self.plan.fragments):
            tiles = (
                TileGrid.of(p.shape).to_tiles(get_piece(self.begins, p)) for p in pieces
            )
            raw = b"".join(array.tobytes() for array in tiles)
            anchors[fragment] = self.exchange.put_anchor(fragment, raw)
        self.replica = join(self.plan, self.trainer, self.exchange, anchors, restored)
        return restored

    def save(self, steps, versions, outstanding=()):
        self.checkpoints.save(
            self.replica.trees(),
            steps=steps,
            versions=versions,
            outstanding=outstanding,
            unheard=[Record(seq=8, kind="progress", step=steps, value=-5)],
            final=True,
        )

    def host(self, name):
        # Of copies: what is seen by the host is not given away by a donation.
        held = {"params": self.replica.params, **self.replica.trees()}
        copies = jax.tree.map(lambda x: x.copy(), held[name])
        return jax.device_get(copies)

    def close(self):
        self.checkpoints.close(PATIENCE_S)


@pytest.fixture
def first(config, parts, tmp_path, monkeypatch):
    """3 steps; a merged and an outstanding take of fragment 0; saved; then further,
    before anything of it is written."""
    done, write = threading.Event(), checkpoint.save
    monkeypatch.setattr(
        checkpoint, "save", lambda *args: done.wait(PATIENCE_S) and write(*args)
    )
    life = Life(config, parts, tmp_path, 1)
    assert life.join([FIRST, FIRST]) is None
    for step in range(5):
        if step == 1:
            life.replica.take(0)
            life.replica.judge(0, "settled")
        if step == 2:
            life.replica.take(0)
            life.replica.take(1)
            life.replica.judge(1, "settled")
        if step == 3:
            life.save(3, [FIRST, FIRST], outstanding=[0])
            life.saved = {n: life.host(n) for n in ("params", "moments", "residuals")}
        life.replica.step({"tokens": BATCH}, 0.1)
    done.set()
    life.close()
    return life


def alike(a, b):
    return all(
        np.array_equal(x, y)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_moments_come_back_and_parameters_are_the_coordinators(
    first, config, parts, tmp_path
):
    assert not alike(first.host("moments"), first.saved["moments"]), "it went on"
    second = Life(config, parts, tmp_path, 2)
    restored = second.join([FIRST, FIRST])
    assert (restored.incarnation, restored.steps) == (1, 3)
    (unheard,) = restored.unheard
    assert (unheard["incarnation"], unheard["seq"], unheard["value"]) == (1, 8, -5)
    assert alike(second.host("moments"), first.saved["moments"])
    assert not alike(second.host("params"), first.saved["params"])
    assert alike(second.host("params"), second.begins)
    # What was read is the step's to donate.
    second.replica.step({"tokens": BATCH}, 0.1)
    second.replica.step({"tokens": BATCH}, 0.1)
    second.close()


@pytest.mark.parametrize("merged_since", [False, True])
def test_a_residual_comes_back_unless_a_take_or_a_merge_came_after_it(
    first, config, parts, tmp_path, merged_since
):
    saved = first.saved["residuals"]
    assert all(any(np.any(piece) for piece in fragment) for fragment in saved)
    second = Life(config, parts, tmp_path, 2)
    restored = second.join([FIRST, SECOND if merged_since else FIRST])
    assert list(restored.residuals) == ([] if merged_since else [1])
    sent, settled = second.host("residuals")
    assert not any(np.any(piece) for piece in sent), "the outstanding take has it"
    assert alike(settled, saved[1]) != merged_since
    second.close()


def test_residuals_and_parameters_of_bands_come_back(config, tmp_path):
    sync = dataclasses.replace(config.run.sync, fragments=5)
    run = dataclasses.replace(config.run, sync=sync)
    config = dataclasses.replace(config, run=run)
    model, trainer = build_trainer(run, config.islands["a"])
    parts = model, trainer, build_plan(run, model)
    versions = [FIRST] * 5
    life = Life(config, parts, tmp_path, 1)
    assert any(piece.bands for piece in life.plan.pieces)
    life.join(versions)
    assert alike(life.host("params"), life.begins)
    life.replica.step({"tokens": BATCH}, 0.1)
    for fragment in range(5):
        life.replica.take(fragment)
        life.replica.judge(fragment, "settled")
    life.save(1, versions)
    saved = life.host("residuals")
    life.close()
    second = Life(config, parts, tmp_path, 2)
    assert list(second.join(versions).residuals) == list(range(5))
    assert alike(second.host("residuals"), saved)
    for pieces, residuals in zip(life.plan.fragments, saved, strict=True):
        assert [piece.shape for piece in pieces] == [x.shape for x in residuals]
    assert alike(second.host("params"), second.begins)
    second.close()


def test_a_take_after_a_checkpoint_of_the_same_step_is_known(config, parts, tmp_path):
    life = Life(config, parts, tmp_path, 1)
    life.join([FIRST, FIRST])
    life.replica.step({"tokens": BATCH}, 0.1)
    life.save(1, [FIRST, FIRST])
    life.save(1, [FIRST, FIRST], outstanding=[0])
    life.close()
    second = Life(config, parts, tmp_path, 2)
    assert list(second.join([FIRST, FIRST]).residuals) == [1]
    second.close()


def test_a_checkpoint_of_another_run_is_refused(first, config, parts, tmp_path):
    with pytest.raises(ConfigError, match=r"of run run-1, this is run run-2"):
        Life(config, parts, tmp_path, 2, run_id="run-2")


def test_one_checkpoint_is_due_at_a_time(config, parts, tmp_path, monkeypatch):
    life = Life(config, parts, tmp_path, 1)
    life.join([FIRST, FIRST])
    assert life.checkpoints.due()
    life.save(1, [FIRST, FIRST])
    life.close()
    patient = dataclasses.replace(
        config, placement=Placement(checkpoint_every_s=PATIENCE_S)
    )
    assert not Life(patient, parts, tmp_path, 1).checkpoints.due()


def test_one_that_is_due_before_the_first_step_is_written_after_it(
    config, parts, tmp_path, monkeypatch
):
    """As where a start takes longer than the time between two."""
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(checkpoints, "time", clock)
    placement = Placement(checkpoint_every_s=PATIENCE_S)
    patient = dataclasses.replace(config, placement=placement)
    life = Life(patient, parts, tmp_path, 1)
    life.join([FIRST, FIRST])
    clock.monotonic = lambda: PATIENCE_S
    assert life.checkpoints.due()
    life.save(0, [FIRST, FIRST])
    assert life.checkpoints.due()
    life.save(1, [FIRST, FIRST])
    life.close()
    assert not life.checkpoints.due()


def test_a_failure_to_write_is_told_and_costs_nothing_else(
    config, parts, tmp_path, monkeypatch, caplog
):
    life = Life(config, parts, tmp_path, 1)
    life.join([FIRST, FIRST])

    def full(*args):
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with caplog.at_level(logging.ERROR):
        life.save(1, [FIRST, FIRST])
        life.close()
    (record,) = caplog.records
    for shown in ("training goes on", str(tmp_path), "no space left on device"):
        assert shown in record.getMessage()


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_built(
    config, tmp_path
):
    (tmp_path / "file").write_text("")
    placement = dataclasses.replace(config.placement, checkpoints="asked for")
    asked = dataclasses.replace(config, placement=placement)
    with pytest.raises(ConfigError, match="cannot write checkpoints to"):
        Checkpoints(asked, "a", checkpoint.Folder(tmp_path / "file" / "in"))


def test_without_an_interval_nothing_is_written(config, parts, tmp_path):
    never = dataclasses.replace(config, placement=Placement(checkpoint_every_s=0))
    life = Life(never, parts, tmp_path / "none", 1)
    life.join([FIRST, FIRST])
    assert not life.checkpoints.due()
    life.save(1, [FIRST, FIRST])
    life.close()
    assert not (tmp_path / "none").exists()


# ---- hosts that do not share a folder ------------------------------------------------


def opened_apart(config, parts, folders):
    """Return the results of `open` on two hosts with these folders."""
    store = Store()
    identity = Identity(run_id="run-1", island="a", incarnation=1, session="session")

    def one(index):
        checkpoints = Checkpoints(config, "a", checkpoint.Folder(folders[index]))
        try:
            checkpoints.open(identity, parts[2], Hosts(store, index, 2))
        except ConfigError as error:
            return str(error)
        return checkpoints.due()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2), timeout=PATIENCE_S))


def test_hosts_with_folders_of_their_own_write_none_and_say_so(
    config, parts, tmp_path, caplog
):
    config = dataclasses.replace(
        config, islands={"a": IslandConfig(batch_size=2, hosts=2)}
    )
    with caplog.at_level(logging.WARNING):
        found = opened_apart(config, parts, [tmp_path / "0", tmp_path / "1"])
    assert found == [False, False]
    assert "2 hosts of island 'a' do not share" in caplog.text
    assert "--checkpoints gs://BUCKET" in caplog.text
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def test_a_folder_that_was_asked_for_must_be_shared(config, parts, tmp_path):
    placement = dataclasses.replace(config.placement, checkpoints=str(tmp_path))
    config = dataclasses.replace(config, placement=placement)
    folders = [tmp_path / "0", tmp_path / "1"]
    for told, folder in zip(opened_apart(config, parts, folders), folders, strict=True):
        assert f"do not share the folder {folder}" in told
        assert "--checkpoints" in told


FRAGMENTS = 4
TREE = {
    "stacked": [jnp.arange(4 * 24.0).reshape(4, 24) / 7],
    "plain": tuple(jnp.full((3, 5), n / 3) for n in range(4)),
}


def identity(**changes):
    fields = {"run_id": "f00", "island": "a", "incarnation": 1, "session": "s"}
    return Identity(**(fields | changes))


def made(error_feedback=True):
    """An island of anchors of zeros that has taken every fragment at `TREE`."""
    leaves = LikeLeaves(TREE)
    run = RunConfig(sync=SyncConfig(fragments=FRAGMENTS, error_feedback=error_feedback))
    axes = jax.tree.map(lambda x: (None,) * len(x.shape), leaves.like)
    axes["stacked"]["0"] = ("layers", None)
    plan = build_plan(run, Model(lambda key: leaves.like, None, axes))
    exchange = Exchange(plan, run.sync, leaves.zeros())
    nothing = {
        f: exchange.put_anchor(f, np.zeros(exchange.anchor_bytes(f), np.uint8))
        for f in range(FRAGMENTS)
    }
    exchange.start(nothing)
    params = leaves.as_listed(TREE)
    for fragment in range(FRAGMENTS):
        exchange.take(fragment, params)
    return exchange, leaves


def residuals_of(exchange, fragment):
    return [np.asarray(held.settled) for held in exchange.held(fragment)]


def kept(exchange, leaves, folder, outstanding=(), **changes):
    """The state, through a checkpoint."""
    state = saved_state(
        exchange,
        leaves,
        identity(**changes),
        steps=12,
        versions=[FIRST_VERSION] * FRAGMENTS,
        outstanding=outstanding,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state")


def test_residuals_come_back_where_nothing_came_after_them(tmp_path):
    exchange, leaves = made()
    for fragment in (0, 1, 2):
        exchange.judge(fragment, "settled", None)
    state = kept(exchange, leaves, tmp_path, outstanding=[3])
    now = [FIRST_VERSION, Version(1, 5), FIRST_VERSION, FIRST_VERSION]
    restored = restored_state(state, exchange, leaves, now)
    assert (restored.incarnation, restored.steps) == (1, 12)
    assert sorted(restored.residuals) == [0, 2]
    for fragment in (0, 2):
        expected = residuals_of(exchange, fragment)
        assert any(array.any() for array in expected)
        for array, value in zip(expected, restored.residuals[fragment], strict=True):
            np.testing.assert_array_equal(value, array)


def test_an_outstanding_take_is_as_if_it_were_not_there(tmp_path):
    exchange, leaves = made()
    state = kept(exchange, leaves, tmp_path)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state["residuals"]))


def test_without_error_feedback_there_are_a_few_numbers_alone(tmp_path):
    exchange, leaves = made(error_feedback=False)
    state = kept(exchange, leaves, tmp_path)
    assert sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(state)) < 200
    assert not restored_state(
        state, exchange, leaves, [FIRST_VERSION] * FRAGMENTS
    ).residuals


def test_a_state_that_is_none_of_this_island_is_named(tmp_path):
    exchange, leaves = made()
    state = kept(exchange, leaves, tmp_path)
    require_own(state, identity(incarnation=2), exchange, FRAGMENTS)
    for changes, fragments, shown in (
        ({"run_id": "bad"}, FRAGMENTS, "state is of run 'f00', this is run 'bad'"),
        ({"island": "b"}, FRAGMENTS, "of island 'a', this is island 'b'"),
        ({"incarnation": 1}, FRAGMENTS, "of incarnation 1, this one is 1"),
        ({}, 7, "versions of 4 fragments, the run has 7"),
    ):
        here = identity(**({"incarnation": 2} | changes))
        with pytest.raises(ConfigError, match=shown):
            require_own(state, here, exchange, fragments)
    some = {k: v for k, v in state.items() if k not in ("residuals", "steps")}
    with pytest.raises(ConfigError, match="lacks residuals, steps"):
        require_own(some, identity(incarnation=2), exchange, FRAGMENTS)
    other = state | {"residuals": {"w": np.zeros(3, np.float32)}}
    with pytest.raises(ValueError, match="parameters of other names"):
        restored_state(other, exchange, leaves, [FIRST_VERSION] * FRAGMENTS)
