"""A disk that fails: what is on it afterwards."""

import pytest

from diloco_jax.coordinator.journal import DurableError
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.simulation.faults.arrays import first_anchors
from diloco_jax.simulation.faults.disk import Disk, DiskError, EmptyDiskError

FIRST = first_anchors(1)[0]


@pytest.fixture
def disk() -> Disk:
    begun = Disk()
    begun.begin(State(), (FIRST,))
    return begun


def numbers(disk: Disk) -> list[int]:
    return [record["n"] for record in disk.load().records]


@pytest.mark.parametrize(("share", "kept"), [(0.0, [0]), (0.9, [0]), (1.0, [0, 1])])
def test_an_append_that_fails_leaves_all_of_it_or_nothing(
    disk: Disk, share: float, kept: list[int]
) -> None:
    disk.append({"n": 0})
    with pytest.raises(DiskError) as failure:
        disk.append({"n": 1}, share)
    assert failure.value.complete == (kept == [0, 1])
    assert numbers(disk) == kept
    disk.append({"n": 7})
    assert numbers(disk) == [*kept, 7]
    with pytest.raises(DiskError):
        disk.append({"n": 8}, 0.5)
    disk.rotate()
    with pytest.raises(DurableError, match="later segments exist"):
        disk.load()
    disk.empty = True
    with pytest.raises(EmptyDiskError):
        disk.load()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_torn_snapshot_is_passed_over_and_does_not_count_as_kept(
    disk: Disk, count: int
) -> None:
    for number in range(1, count + 1):
        disk.append({"n": number})
        disk.save_state(disk.rotate(), State(tick=number))
    disk.append({"n": count + 1})
    assert (disk.load().state.tick, numbers(disk)) == (count, [count + 1])
    assert disk.tear_snapshots() == 1
    assert disk.load().state.tick == count - 1
    assert numbers(disk) == [count, count + 1]
    assert not disk.tear_snapshots(), "there is no other that reads"
    disk.save_state(disk.rotate(), State(tick=9))
    assert disk.tear_snapshots() == 1
    assert disk.load().state.tick == count - 1
