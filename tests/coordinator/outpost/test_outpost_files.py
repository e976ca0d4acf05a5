"""Files of fragments on their way between a lead and its outposts."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from outpost_support import (
    NEW,
    asked,
    begin,
    elsewhere,
    placed,
)

from diloco_jax import deadlines, storage
from diloco_jax.config import ConfigError
from diloco_jax.coordinator.workers.outpost import dialing
from diloco_jax.coordinator.workers.outpost import outpost as outposts
from diloco_jax.coordinator.workers.outpost.files import FragmentFiles, at_work
from diloco_jax.deadlines import Deadlines
from diloco_jax.protocol.holding import AtWork
from diloco_jax.protocol.values import Version
from diloco_jax.wire.errors import ConnectionLost

OLD = Version(1, 3)
PATIENCE_S = 60.0
BUDGET_S = 1.0
LONG = 12
"""Signs of life that take longer than `idle_s`."""


@pytest.fixture
def slow_disk(monkeypatch):
    """Makes checks of files in a folder last until the other end has heard for long
    that they do; it is the end that decodes with this function of a module."""

    def make(folder: Path, module, name: str) -> None:
        heard = threading.Semaphore(0)
        decode, check = getattr(module, name), storage.check_sealed

        def hear(frame: bytes):
            found = decode(frame)
            if isinstance(found, AtWork):
                heard.release()
            return found

        def check_slowly(path: Path) -> None:
            for _ in range(LONG * path.is_relative_to(folder)):
                assert heard.acquire(timeout=PATIENCE_S)
            check(path)

        # A disk may take minutes for these files, too.
        monkeypatch.setattr(deadlines, "SLOWEST_DISK_BYTES_PER_S", 0.1)
        monkeypatch.setattr(module, name, hear)
        monkeypatch.setattr(storage, "check_sealed", check_slowly)

    return make


def written(files: FragmentFiles, kind, fragment, version, content: bytes):
    path = files.path(kind, fragment, version)
    path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_sealed(path, {}, [content])
    return path


def content(path) -> bytes:
    return bytes(storage.map_sealed(path)[1])


def damage(path) -> None:
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def test_fragments_of_this_machine_move_to_the_worker(config, serve, tmp_path):
    """The newest snapshot that counts, and the publishes after it; merges that never
    were go. A fragment that has come further there stays as it is."""
    serve(config)
    place = elsewhere(config, tmp_path / "lead")
    here = place._files
    there = FragmentFiles(config.placement, tmp_path / "there")
    large = bytes(3 << 20) + b"end"
    written(here, "snapshot", 0, OLD, large)
    written(here, "snapshot", 0, Version(1, 9), b"never was")
    for number in (2, 4, 5, 6):
        written(here, "publish", 0, Version(1, number), b"%d" % number)
    written(here, "snapshot", 2, OLD, b"old")
    written(there, "snapshot", 2, NEW, b"new")
    written(here, "snapshot", 1, OLD, b"another worker's")
    place._hand_over(asked(0, 2).fragments)
    assert content(there.path("snapshot", 0, OLD)) == large
    assert there.newest(0) == OLD
    assert there.publishes(0, Version(9)) == [Version(1, 4), Version(1, 5)]
    assert (there.newest(2), there.newest(1)) == (NEW, None)
    assert (here.newest(0), here.newest(2), here.newest(1)) == (None, None, OLD)
    assert here.publishes(0, Version(9)) == []


def test_a_move_that_breaks_off_leaves_what_did_not_come(
    config, serve, tmp_path, monkeypatch
):
    """The snapshot comes last: while it is missing there, nothing stands for the
    publishes. A second attempt moves the rest."""
    config = placed(config, time_budget_s=0.5)
    serve(config)
    place = elsewhere(config, tmp_path / "lead")
    here, there = place._files, FragmentFiles(config.placement, tmp_path / "there")
    written(here, "snapshot", 0, OLD, b"snapshot")
    for number in (4, 5):
        written(here, "publish", 0, Version(1, number), b"%d" % number)
    sends, sent = dialing.send_file, []

    def breaks(end, path, size, moved):
        if len(sent) == 2:
            raise ConnectionResetError("the line broke")
        sent.append(path)
        sends(end, path, size, moved)

    monkeypatch.setattr(dialing, "send_file", breaks)
    with pytest.raises(ConnectionLost):
        place._hand_over(asked(0).fragments)
    assert here.publishes(0, NEW) == [Version(1, 4), NEW]
    monkeypatch.setattr(dialing, "send_file", sends)
    place._hand_over(asked(0).fragments)
    assert (there.newest(0), there.publishes(0, NEW)) == (OLD, [Version(1, 4), NEW])
    assert (here.newest(0), here.publishes(0, NEW)) == (None, [])


def test_publishes_move_to_a_worker_that_has_their_snapshot(config, serve, tmp_path):
    serve(config)
    place = elsewhere(config, tmp_path / "lead")
    there = FragmentFiles(config.placement, tmp_path / "there")
    for files in (place._files, there):
        written(files, "snapshot", 0, OLD, b"the same snapshot of this version")
    written(place._files, "publish", 0, NEW, b"5")
    place._hand_over(asked(0).fragments)
    assert there.publishes(0, NEW) == [NEW]


def test_another_snapshot_of_the_same_version_takes_its_place(config, serve, tmp_path):
    """A first start that failed leaves its parameters, and the next may have others."""
    serve(config)
    place = elsewhere(config, tmp_path / "lead")
    there = FragmentFiles(config.placement, tmp_path / "there")
    written(there, "snapshot", 0, NEW, b"of the start that failed")
    written(place._files, "snapshot", 0, NEW, b"of this start, as it were")
    place._hand_over(asked(0).fragments)
    path = there.path("snapshot", 0, NEW)
    assert content(path) == b"of this start, as it were"


def test_a_worker_whose_snapshots_are_in_a_bucket_takes_no_file_of_one(
    config, tmp_path
):
    files = FragmentFiles(placed(config, checkpoints="gs://b/o").placement, tmp_path)
    with pytest.raises(ConfigError, match="and another machine moves one as a file"):
        files.path("snapshot", 0, NEW)


def test_last_snapshots_and_kept_cycles_come_home(config, serve, tmp_path):
    serve(config)
    place = elsewhere(config, tmp_path / "lead")
    here, there = place._files, FragmentFiles(config.placement, tmp_path / "there")
    written(there, "snapshot", 2, NEW, b"new")
    written(here, "snapshot", 2, OLD, b"of an end before")
    place.bring_home(2)
    assert content(here.path("snapshot", 2, NEW)) == b"new"
    assert here.newest(2, OLD) is None
    assert there.newest(2) == NEW
    for cycle in (3, 4):
        path = there.kept_path(cycle, 2)
        path.parent.mkdir(parents=True)
        storage.write_sealed(path, {}, [b"kept"])
    place.fetch_kept(4, 2)
    assert content(here.kept_path(4, 2)) == b"kept"
    assert not there.kept_path(3, 2).parent.exists()
    assert not there.kept_path(4, 2).parent.exists()
    with pytest.raises(ConnectionLost, match="GetKept of lead 7 failed"):
        place.fetch_kept(5, 2)
    with pytest.raises(ConnectionLost, match="fragment 0 has no snapshot here"):
        place.bring_home(0)


def test_a_snapshot_that_comes_home_damaged_takes_no_others_place(
    config, serve, tmp_path
):
    serve(config)
    place = elsewhere(config, tmp_path / "lead")
    here, there = place._files, FragmentFiles(config.placement, tmp_path / "there")
    damage(written(there, "snapshot", 2, NEW, b"new"))
    old = written(here, "snapshot", 2, OLD, b"of an end before")
    with pytest.raises(OSError, match=r"came damaged: .* has checksum"):
        place.bring_home(2)
    assert content(old) == b"of an end before"
    assert here.newest(2) == OLD


def test_of_snapshots_here_the_newest_whole_one_moves(config, serve, tmp_path):
    """A damaged one is refused there; the one before it and publishes lead as far."""
    serve(config)
    place = elsewhere(config, tmp_path / "lead")
    here, there = place._files, FragmentFiles(config.placement, tmp_path / "there")
    damage(written(here, "snapshot", 0, NEW, b"new"))
    written(here, "snapshot", 0, OLD, b"old")
    for number in (4, 5):
        written(here, "publish", 0, Version(1, number), b"%d" % number)
    place.open(begin(tmp_path), asked(0), new=False).end.close()
    assert (there.newest(0), there.publishes(0, NEW)) == (OLD, [Version(1, 4), NEW])
    assert here.newest(0) is None


def test_a_file_that_breaks_off_leaves_nothing(config, serve, tmp_path, monkeypatch):
    serve(config)
    place = elsewhere(config, tmp_path / "lead")
    path = written(place._files, "snapshot", 0, NEW, bytes(9))
    monkeypatch.setattr(
        "diloco_jax.coordinator.workers.outpost.dialing.send_file",
        lambda end, path, size, moved: end.sendall(bytes(3)),
    )
    quick = placed(config, time_budget_s=0.5)
    place = elsewhere(quick, tmp_path / "lead")
    with pytest.raises(ConnectionLost):
        place._hand_over(asked(0).fragments)
    assert path.exists(), "it is here as before"
    assert not list((tmp_path / "there" / "checkpoints").rglob("*.snapshot"))


def test_a_disk_that_takes_long_there_makes_no_file_go_again(
    config, serve, tmp_path, slow_disk
):
    config = placed(config, time_budget_s=BUDGET_S)
    serve(config)
    place = elsewhere(config, tmp_path / "lead")
    written(place._files, "snapshot", 0, NEW, b"new")
    slow_disk(tmp_path / "there", dialing, "from_outpost")
    place._hand_over(asked(0).fragments)
    assert FragmentFiles(config.placement, tmp_path / "there").newest(0) == NEW


def test_a_disk_that_takes_long_here_parts_no_outpost(
    config, serve, tmp_path, slow_disk
):
    """It hears at last that the lead has the file."""
    config = placed(config, time_budget_s=BUDGET_S)
    serve(config)
    place = elsewhere(config, tmp_path / "lead")
    path = FragmentFiles(config.placement, tmp_path / "there").kept_path(4, 2)
    path.parent.mkdir(parents=True)
    storage.write_sealed(path, {}, [b"kept"])
    slow_disk(tmp_path / "lead", outposts, "files_asked")
    place.fetch_kept(4, 2)
    assert content(place._files.kept_path(4, 2)) == b"kept"
    assert not path.exists()


def test_snapshots_that_are_checked_before_they_move_part_no_outpost(
    config, serve, tmp_path, slow_disk
):
    config = placed(config, time_budget_s=BUDGET_S)
    serve(config)
    place = elsewhere(config, tmp_path / "lead")
    place._doubted = True
    written(place._files, "snapshot", 0, NEW, b"new")
    slow_disk(tmp_path / "lead", outposts, "files_asked")
    place._hand_over(asked(0).fragments)
    assert FragmentFiles(config.placement, tmp_path / "there").newest(0) == NEW


def test_a_disk_that_hangs_is_awaited_as_long_as_a_slow_one_needs():
    here, other = socket.socketpair()
    other.settimeout(BUDGET_S)
    quick = at_work(here, Deadlines(0.05), 0, lambda: None)
    with here, other, quick, pytest.raises(TimeoutError):
        hear_often(other)


def hear_often(end: socket.socket) -> None:
    for _ in range(1000):
        assert end.recv(64)
