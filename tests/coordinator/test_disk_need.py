"""Room on the coordinator's disks follows from the state's size, as in the plan."""

from __future__ import annotations

import dataclasses

import pytest
from tiny import MODEL

from diloco_jax.config import Config, OuterConfig, RunConfig, SyncConfig
from diloco_jax.coordinator import disk_space
from diloco_jax.coordinator.disk_space import DiskNeed
from diloco_jax.coordinator.holding.publishes import SPARED_BYTES
from diloco_jax.coordinator.settings import state_sizes
from diloco_jax.models.build import build, build_plan
from diloco_jax.planning.coordinator import plan_coordinator

OUTER = OuterConfig(optimizer="nesterov", learning_rate=0.7, momentum=0.9)
CONFIG = Config(
    run=RunConfig(model=MODEL, outer=OUTER, sync=SyncConfig(fragments=2)),
)
PLAN = build_plan(CONFIG.run, build(CONFIG.run))
STATE, LARGEST, PUBLISH = state_sizes(CONFIG.run, PLAN)
IDLE = {"merges": 0, "seconds": 100.0}


def need_of(tmp_path, **changes) -> DiskNeed:
    placement = dataclasses.replace(CONFIG.placement, **changes)
    config = dataclasses.replace(CONFIG, placement=placement)
    return DiskNeed(config, PLAN, tmp_path / "run")


def hold(folder, octets: int) -> None:
    folder.mkdir(parents=True)
    (folder / "some").write_bytes(bytes(octets))


def test_the_state_is_that_of_the_plan():
    placed = CONFIG.placement
    plan = plan_coordinator(CONFIG.run, placed, PLAN, 2, 10.0, 4, 1e9, cycles=1.0)
    assert plan.theta + plan.anchors + plan.outer_state == STATE
    assert plan.disk.snapshots == placed.snapshots_kept * STATE + LARGEST
    assert plan.publishes == PUBLISH


@pytest.mark.parametrize(
    ("held", "rounds"), [(0.0, 1.0), (1.0, 1.0), (1.75, 0.25), (2.0, 0.0), (3.0, 0.0)]
)
def test_a_round_needs_the_snapshots_that_are_not_there_yet(tmp_path, held, rounds):
    need = need_of(tmp_path, snapshots_kept=2)
    hold(tmp_path / "run" / "checkpoints" / "coordinator" / "0", round(held * STATE))
    wanted = rounds * STATE + LARGEST + SPARED_BYTES
    (found,) = need.free(IDLE).values()
    assert found == pytest.approx(wanted, abs=1)


def test_a_round_needs_its_publishes(tmp_path):
    need = need_of(tmp_path, snapshot_every_s=50.0)
    merging = {"merges": 4 * len(PLAN.sizes), "seconds": 100.0}
    (idle,), (found,) = need.free(IDLE).values(), need.free(merging).values()
    assert found - idle == 2 * PUBLISH, "two of each fragment"


def test_folders_of_one_disk_need_what_is_written_to_both(tmp_path):
    elsewhere = tmp_path / "other"
    need = need_of(tmp_path, checkpoints=str(elsewhere), snapshot_every_s=50.0)
    merging = {"merges": 4 * len(PLAN.sizes), "seconds": 100.0}
    both = 2 * PUBLISH + STATE + LARGEST + SPARED_BYTES
    assert need.free(merging) == {tmp_path / "run": both, elsewhere: 0}


def test_each_folder_needs_what_is_written_there(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_space, "_disk_of", hash)
    elsewhere = tmp_path / "other"
    need = need_of(tmp_path, checkpoints=str(elsewhere))
    assert need.folders == {"workdir": tmp_path / "run", "checkpoints": elsewhere}
    assert need.free(IDLE) == {
        tmp_path / "run": SPARED_BYTES,
        elsewhere: SPARED_BYTES + STATE + LARGEST,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"checkpoints": "gs://bucket/folder"},
        {"workers": 2, "worker_addresses": ("w0:1", "w1:1")},
    ],
)
def test_what_is_written_elsewhere_needs_nothing_here(tmp_path, changes):
    assert need_of(tmp_path, **changes).free(IDLE) == {tmp_path / "run": SPARED_BYTES}
