"""A disk that fails: what is on it afterwards."""

import pytest

from diloco_jax.coordinator.log import DurableError
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.values import Version
from diloco_jax.simulation.faults.arrays import Anchor, first_anchors
from diloco_jax.simulation.faults.disk import Disk, DiskError, EmptyDiskError


def begun() -> Disk:
    disk = Disk()
    disk.begin(State(), first_anchors(1))
    return disk


def numbers(disk: Disk) -> list[int]:
    return [record["n"] for record in disk.load().records]


@pytest.mark.parametrize(("share", "kept"), [(0.0, 1), (0.1, 1), (0.9, 1), (1.0, 2)])
def test_a_write_that_fails_leaves_all_nothing_or_a_torn_record(
    share: float, kept: int
) -> None:
    disk = begun()
    disk.fails_in, disk.written_share = 1, share
    disk.append({"n": 0})
    with pytest.raises(DiskError) as failure:
        disk.append({"n": 1})
    assert failure.value.complete == (kept == 2)
    assert numbers(disk) == [0, 1][:kept]
    disk.append({"n": 7})
    assert numbers(disk) == [*[0, 1][:kept], 7]


def with_states(count: int) -> Disk:
    """So many after the first, each with its number in a record after it."""
    disk = begun()
    for number in range(1, count + 1):
        disk.append({"n": number})
        disk.save_state(disk.rotate(), State(tick=number))
    disk.append({"n": count + 1})
    return disk


def test_the_newest_snapshot_is_gone_on_from() -> None:
    disk = with_states(2)
    assert disk.load().state.tick == 2
    assert numbers(disk) == [3]


def test_a_snapshot_counts_once_it_is_complete() -> None:
    disk = with_states(1)
    disk.rotate()
    disk.append({"n": 3})
    assert disk.load().state.tick == 1
    assert numbers(disk) == [2, 3]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_torn_snapshot_is_passed_over_and_does_not_count_as_kept(count: int) -> None:
    disk = with_states(count)
    assert disk.tear_snapshots() == 1
    assert disk.load().state.tick == count - 1
    assert numbers(disk) == [count, count + 1]
    assert not disk.tear_snapshots(), "there is no other that reads"
    disk.save_state(disk.rotate(), State(tick=9))
    assert disk.tear_snapshots() == 1
    assert disk.load().state.tick == count - 1


def merged(disk: Disk, anchor: Anchor, count: int) -> Anchor:
    """Prepare so many more publishes; return the anchor that they lead to."""
    for _ in range(count):
        publish = repr(anchor).encode()
        assert disk.prepare(0, anchor.version.next(), publish)
        anchor = anchor.next(publish)
    return anchor


def test_publishes_lead_from_any_kept_snapshot_to_what_is_committed() -> None:
    disk = begun()
    anchor = first_anchors(1)[0]
    for _ in range(3):
        anchor = merged(disk, anchor, 2)
        disk.save_fragment(0, anchor)
    assert disk.saved(0) == [Version(1, 4), Version(1, 6)]
    newest = merged(disk, anchor, 1)
    assert list(disk.published(0)) == [Version(1, n) for n in (5, 6, 7)]
    for _ in range(2):
        assert disk.restore([newest.version])[0].anchors == [newest]
        disk.tear_snapshots()
        disk.load()


def test_what_is_prepared_and_not_committed_is_discarded() -> None:
    disk = begun()
    committed = merged(disk, first_anchors(1)[0], 1)
    merged(disk, committed, 1)
    assert disk.restore([committed.version])[0].anchors == [committed]
    assert list(disk.published(0)) == [committed.version]


def test_a_snapshot_of_what_never_was_goes_before_another_has_its_version() -> None:
    """A worker had swapped it in, and the next lead's log has not committed it."""
    disk = begun()
    committed = merged(disk, first_anchors(1)[0], 1)
    disk.save_fragment(0, committed)
    disk.save_fragment(0, committed.next(b"never was"))
    assert disk.restore([committed.version])[0].anchors == [committed]
    assert disk.saved(0) == [committed.version]
    newest = merged(disk, committed, 1)
    assert disk.restore([newest.version])[0].anchors == [newest]


def test_a_committed_publish_that_is_missing_is_damage() -> None:
    disk = begun()
    committed = merged(disk, first_anchors(1)[0], 2)
    disk.forget(0, Version(1, 1))
    with pytest.raises(DurableError, match="is missing"):
        disk.restore([committed.version])


def test_a_full_disk_takes_small_records_only() -> None:
    disk = begun()
    disk.full = True
    disk.append({"n": 0})
    assert numbers(disk) == [0]
    anchor = first_anchors(1)[0]
    assert not disk.prepare(0, Version(1, 1), b"")
    assert not disk.save_fragment(0, anchor._replace(version=Version(1, 1)))
    assert not disk.save_state(disk.rotate(), State())
    assert disk.saved(0) == [anchor.version]


def test_an_empty_disk_and_a_torn_middle_are_errors() -> None:
    disk = begun()
    disk.fails_in, disk.written_share = 0, 0.5
    with pytest.raises(DiskError):
        disk.append({"n": 0})
    disk.rotate()
    with pytest.raises(DurableError, match="later segments exist"):
        disk.load()
    disk.empty = True
    with pytest.raises(EmptyDiskError):
        disk.load()
