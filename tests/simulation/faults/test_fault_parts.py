"""A disk that fails and a network in trouble: what is there afterwards, when, and how
often."""

from collections.abc import Callable

import pytest

from diloco_jax.coordinator.journal import DurableError
from diloco_jax.protocol.coordinator.state import State
from diloco_jax.simulation.clock import Clock
from diloco_jax.simulation.faults.arrays import first_anchors
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
