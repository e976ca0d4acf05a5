"""A write that finds no space is repeated while islands hold out, and people know; the
room that a coordinator needs follows from the state's size, as in the plan.
"""

from __future__ import annotations

import dataclasses
import errno
import os

import pytest
from tiny import MODEL

from diloco_jax.config import Config, OuterConfig, RunConfig, SyncConfig
from diloco_jax.coordinator import watchdog
from diloco_jax.coordinator.holding.fragment_snapshots import SPARED_BYTES
from diloco_jax.coordinator.journal import RecordLog, read
from diloco_jax.coordinator.settings import state_sizes
from diloco_jax.coordinator.watchdog import DiskNeed, DiskWait
from diloco_jax.models.build import build, build_plan
from diloco_jax.observability import metrics as metrics_module
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape, read_tape
from diloco_jax.planning.coordinator import plan_coordinator
from diloco_jax.planning.terms import terms_of

PATIENCE_S = 60.0


@pytest.fixture
def disk(monkeypatch):
    monkeypatch.setattr(watchdog, "AGAIN_S", 0.0)
    return DiskWait(PATIENCE_S, ended=lambda: False)


def full(times, path="somewhere", code=errno.ENOSPC, seen=lambda: None):
    """A write that finds no space so many times."""
    left = [times]

    def write():
        if left[0]:
            left[0] -= 1
            seen()
            raise OSError(code, os.strerror(code), path)

    return write


@pytest.mark.parametrize(
    ("code", "lacks", "does"),
    [
        (errno.ENOSPC, "space", "make room there"),
        (errno.EMFILE, "a free file", "raise the limit on open files"),
        (errno.ENFILE, "a free file", "raise the limit on open files"),
    ],
)
def test_a_write_is_repeated_until_there_is_room(disk, code, lacks, does):
    during = []
    write = full(3, code=code, seen=lambda: during.append(disk.alerts))
    disk.until_written("a record", write)
    assert during[0] == []
    ((told,),) = during[1:2]
    assert f"a record waits for {lacks} in somewhere" in told
    assert f"islands train on: {does}" in told
    assert "within 60 s (4 * placement.outage_budget_s)" in told
    assert disk.alerts == []
    (waited,) = disk.over()
    assert "a record waited" in waited
    assert disk.over() == [], "each is told once"
    write = full(2, code=code)
    for _ in range(2):
        disk.once("measures", write)
        (told,) = disk.alerts
        assert "measures cannot be written to somewhere" in told
        assert does in told
    disk.once("measures", write)
    assert disk.alerts == [], "it is told until it came"


@pytest.mark.parametrize(("patience_s", "ended"), [(0.0, False), (PATIENCE_S, True)])
def test_the_wait_has_a_deadline_that_is_named(patience_s, ended):
    disk = DiskWait(patience_s, ended=lambda: ended)
    with pytest.raises(OSError, match=f"of {patience_s:g} .*outage_budget_s") as failed:
        disk.until_written("a record", full(9))
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, "somewhere")


def test_a_broken_disk_is_not_waited_for(disk):
    """Its contents are unknown: the next life finds out."""
    write = full(1, code=errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        disk.until_written("a record", write)
    with pytest.raises(OSError, match="Input/output"), disk.put_off("a snapshot"):
        full(1, code=errno.EIO)()


@pytest.fixture
def no_space(monkeypatch):
    """Files take this many bytes more, then none until it is changed."""
    left = [0]
    from diloco_jax import files

    class Raw:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, data):
            room = min(len(data), left[0])
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            left[0] -= room
            return self._file.write(data[:room])

    init = files.Appended.__init__

    def wrapped(self, path):
        init(self, path)
        self._file = Raw(self._file)

    monkeypatch.setattr(files.Appended, "__init__", wrapped)
    return left


def test_a_record_that_fits_in_part_is_in_the_log_once(disk, no_space, tmp_path):
    log = RecordLog(tmp_path / "log", repeat=disk.until_written)

    def freed():
        assert [r["n"] for r in read(tmp_path / "log", -1)] == [0]
        no_space[0] = 1000

    disk.touch = freed
    for number, room in enumerate((1000, 7, 1000)):
        no_space[0] = room
        log.append({"n": number})
    log.close()
    assert [r["n"] for r in read(tmp_path / "log", -1)] == [0, 1, 2]


def test_a_segment_that_cannot_be_begun_leaves_the_one_before(tmp_path, monkeypatch):
    """An empty later segment would make damage of an unfinished record."""
    from diloco_jax.coordinator import journal as durable

    log = RecordLog(tmp_path)
    log.append({"n": 0})
    with monkeypatch.context() as patched:
        patched.setattr(durable, "sync_path", lambda _: full(1)())
        with pytest.raises(OSError, match="No space"):
            log.rotate()
    log.append({"n": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log-000000.bin"]
    assert log.rotate() == 0
    log.append({"n": 2})
    log.close()
    assert [r["n"] for r in read(tmp_path, -1)] == [0, 1, 2]


def test_the_tape_waits_and_its_chain_holds(disk, no_space, tmp_path):
    path = tmp_path / "tape.jsonl"
    disk.touch = lambda: no_space.append(no_space.pop() + 1000)
    tape = Tape(path, repeat=disk.until_written)
    for n in range(3):
        no_space[0] = 5
        tape.append({"kind": "x", "n": n})
    tape.close()
    assert [line["n"] for line in read_tape(path)] == [0, 1, 2]


def test_lines_of_numbers_that_memory_does_not_hold_are_told(
    no_space, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(metrics_module, "MOST_WAITING", 3)
    monkeypatch.setattr(metrics_module, "CURVES", {"island": ()})
    metrics = Metrics(tmp_path)
    for step in range(5):
        metrics.append({"kind": "island", "island": "a", "step": step, "time": 0.0})
    assert "lacks 2 lines" in metrics.alerts[-1]
    no_space[0] = 1000
    metrics.close()
    assert "lacks 2 lines" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


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
    plan = plan_coordinator(terms_of(CONFIG, PLAN, dict.fromkeys(CONFIG.islands, 1.0)))
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


def test_folders_of_one_disk_need_what_is_written_to_both(tmp_path):
    elsewhere = tmp_path / "other"
    need = need_of(tmp_path, checkpoints=str(elsewhere), snapshot_every_s=50.0)
    merging = {"merges": 4 * len(PLAN.sizes), "seconds": 100.0}
    idle = STATE + LARGEST + SPARED_BYTES
    assert need.free(IDLE) == {tmp_path / "run": idle, elsewhere: 0}
    both = 2 * PUBLISH + idle  # Two of each fragment.
    assert need.free(merging) == {tmp_path / "run": both, elsewhere: 0}


def test_each_folder_needs_what_is_written_there(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_disk_of", hash)
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
