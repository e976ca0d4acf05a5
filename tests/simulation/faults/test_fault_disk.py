"""A disk that fails: what is on it afterwards."""

import pytest

from diloco_jax.coordinator.log import DurableError
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.simulation.faults.disk import Disk, DiskError, EmptyDiskError


def begun() -> Disk:
    disk = Disk()
    disk.save(disk.rotate(), State(), "first")
    return disk


def numbers(disk: Disk) -> list[int]:
    return [entry.record["n"] for entry in disk.load().entries]


@pytest.mark.parametrize(("share", "kept"), [(0.0, 1), (0.1, 1), (0.9, 1), (1.0, 2)])
def test_a_write_that_fails_leaves_all_nothing_or_a_torn_record(
    share: float, kept: int
) -> None:
    disk = begun()
    disk.fails_in, disk.written_share = 1, share
    disk.append({"n": 0}, b"payload")
    with pytest.raises(DiskError) as failure:
        disk.append({"n": 1}, b"payload")
    assert failure.value.complete == (kept == 2)
    assert numbers(disk) == [0, 1][:kept]
    disk.append({"n": 7}, b"")
    assert numbers(disk) == [*[0, 1][:kept], 7]


def with_snapshots(count: int) -> Disk:
    """So many after the first, each with its number in a record after it."""
    disk = begun()
    for number in range(1, count + 1):
        disk.append({"n": number}, b"")
        disk.save(disk.rotate(), State(tick=number), f"of {number}")
    disk.append({"n": count + 1}, b"")
    return disk


def test_the_newest_snapshot_is_gone_on_from() -> None:
    disk = with_snapshots(2)
    found = disk.load()
    assert (found.state.tick, found.anchors) == (2, "of 2")
    assert numbers(disk) == [3]


def test_a_snapshot_counts_once_it_is_complete() -> None:
    disk = with_snapshots(1)
    disk.rotate()
    disk.append({"n": 3}, b"")
    assert disk.load().state.tick == 1
    assert numbers(disk) == [2, 3]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_torn_snapshot_is_passed_over_for_the_one_before(count: int) -> None:
    disk = with_snapshots(count)
    assert disk.tear_snapshot()
    assert disk.load().state.tick == count - 1
    assert numbers(disk) == [count, count + 1]
    assert not disk.tear_snapshot(), "there is no other that reads"
    assert numbers(disk) == [count, count + 1]


def test_the_only_snapshot_is_not_torn() -> None:
    assert not begun().tear_snapshot()
    assert begun().load().anchors == "first"


def test_an_empty_disk_and_a_torn_middle_are_errors() -> None:
    disk = begun()
    disk.fails_in, disk.written_share = 0, 0.5
    with pytest.raises(DiskError):
        disk.append({"n": 0}, b"")
    disk.rotate()
    with pytest.raises(DurableError, match="later segments exist"):
        disk.load()
    disk.empty = True
    with pytest.raises(EmptyDiskError):
        disk.load()
