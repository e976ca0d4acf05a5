"""A disk that fails and a network in trouble: what is there afterwards, when, and how
often."""

from collections.abc import Callable

import pytest

from diloco_jax.coordinator.journal import DurableError
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.protocol.messages import Version
from diloco_jax.simulation.clock import Clock
from diloco_jax.simulation.faults.arrays import Anchor, first_anchors
from diloco_jax.simulation.faults.disk import Disk, DiskError, EmptyDiskError
from diloco_jax.simulation.faults.world import RESEND_S, FaultyLine, Network

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


def merged(disk: Disk, anchor: Anchor, count: int) -> Anchor:
    """Prepare so many more publishes; return the anchor that they lead to."""
    for _ in range(count):
        publish = repr(anchor).encode()
        assert disk.prepare(0, anchor.version.next(), publish)
        anchor = anchor.next(publish)
    return anchor


def restored(disk: Disk, anchor: Anchor) -> bool:
    return disk.restore([anchor.version])[0].anchors == [anchor]


def test_publishes_lead_from_any_kept_snapshot_to_what_is_committed(
    disk: Disk,
) -> None:
    anchor = FIRST
    for _ in range(3):
        anchor = merged(disk, anchor, 2)
        disk.save_fragment(0, anchor)
    assert disk.saved(0) == [Version(1, 4), Version(1, 6)]
    newest = merged(disk, anchor, 1)
    assert list(disk.published(0)) == [Version(1, n) for n in (5, 6, 7)]
    merged(disk, newest, 1)  # Prepared, and never committed.
    for _ in range(2):
        assert restored(disk, newest)
        disk.tear_snapshots()
        disk.load()
    assert list(disk.published(0)) == [Version(1, n) for n in (5, 6, 7)]
    disk.forget(0, newest.version)
    with pytest.raises(DurableError, match="is missing"):
        disk.restore([newest.version])


def test_a_snapshot_of_what_never_was_goes_before_another_has_its_version(
    disk: Disk,
) -> None:
    """A worker had swapped it in, and the next lead's log has not committed it."""
    committed = merged(disk, FIRST, 1)
    disk.save_fragment(0, committed)
    disk.save_fragment(0, committed.next(b"never was"))
    assert restored(disk, committed)
    assert disk.saved(0) == [committed.version]
    assert restored(disk, merged(disk, committed, 1))


def test_a_full_disk_takes_small_records_only(disk: Disk) -> None:
    disk.full = True
    disk.append({"n": 0})
    assert numbers(disk) == [0]
    assert not disk.prepare(0, Version(1, 1), b"")
    assert not disk.save_fragment(0, FIRST._replace(version=Version(1, 1)))
    assert not disk.save_state(disk.rotate(), State())
    assert disk.saved(0) == [FIRST.version]


Script = Callable[["Wire"], None]


class Wire:
    """A line, and what arrived on it: (time, what)."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.network = Network(latency_s=1.0, transfer_s=2.0)
        self.line = FaultyLine(self.clock, self.network)
        self.arrived: list[tuple[float, str]] = []

    def send(self, way: str, *size: int, **network: object) -> None:
        """Send in this way, while the network is like that."""
        for field, value in network.items():
            setattr(self.network, field, value)
        send = getattr(self.line, way)
        send(*size, lambda: self.arrived.append((self.clock.now, way)))


def in_order(wire: Wire) -> None:
    wire.send("send_up", control_late_s=5.0)
    wire.send("send_up", control_late_s=0.0)
    wire.send("upload", 1)


def twice(wire: Wire) -> None:
    wire.send("send_up", repeat_after_s=3.0)
    wire.send("download", 1)


def damaged(wire: Wire) -> None:
    wire.send("upload", 1, corrupts=True)
    wire.clock.run(until=1.0)
    wire.network.corrupts = False


def held(wire: Wire) -> None:
    wire.send("send_up", held={"up"})
    wire.send("send_down")
    wire.clock.run(until=9.0)
    wire.network.held = set()
    wire.line.release()


def cut(wire: Wire) -> None:
    wire.send("send_up")
    wire.send("send_down")
    wire.line.cut()


def lingering(wire: Wire) -> None:
    wire.line.linger()
    cut(wire)


@pytest.mark.parametrize(
    ("script", "arrived"),
    [
        (in_order, [(2.0, "upload"), (6.0, "send_up"), (6.0, "send_up")]),
        (twice, [(1.0, "send_up"), (2.0, "download"), (4.0, "send_up")]),
        (damaged, [(2.0 + RESEND_S + 2.0, "upload")]),
        (held, [(1.0, "send_down"), (9.0, "send_up")]),
        (cut, []),
        (lingering, [(1.0, "send_up")]),
    ],
)
def test_what_arrives(script: Script, arrived: list[tuple[float, str]]) -> None:
    wire = Wire()
    script(wire)
    wire.clock.run()
    assert wire.arrived == arrived
