"""A disk that fails: what is on it afterwards."""

import pytest

from diloco_jax.coordinator.durable import DurableError
from diloco_jax.policy.state import State
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


def test_a_snapshot_makes_the_log_before_it_superfluous() -> None:
    disk = begun()
    disk.append({"n": 0}, b"")
    number = disk.rotate()
    disk.append({"n": 1}, b"")
    assert numbers(disk) == [0, 1]
    disk.save(number, State(tick=5), "second")
    found = disk.load()
    assert (found.state.tick, found.anchors) == (5, "second")
    assert numbers(disk) == [1]


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
