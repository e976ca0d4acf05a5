"""A network in trouble: what arrives, when, and how often."""

import pytest

from diloco_jax.simulation.faults.network import RESEND_S, FaultyLine, Network
from diloco_jax.simulation.virtual.clock import Clock


class Wire:
    """A line, and what arrived on it: (time, what)."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.network = Network(latency_s=1.0, transfer_s=2.0)
        self.line = FaultyLine(self.clock, self.network)
        self.arrived: list[tuple[float, str]] = []

    def up(self, what: str) -> None:
        self.line.send_up(lambda: self.note(what))

    def note(self, what: str) -> None:
        self.arrived.append((self.clock.now, what))


def test_messages_stay_in_order_when_a_delay_ends() -> None:
    wire = Wire()
    wire.network.control_late_s = 5.0
    wire.up("first")
    wire.network.control_late_s = 0.0
    wire.up("second")
    wire.line.upload(1, lambda: wire.note("bulk"))
    wire.clock.run()
    assert wire.arrived == [(2.0, "bulk"), (6.0, "first"), (6.0, "second")]


def test_what_is_sent_arrives_twice_and_what_is_fetched_once() -> None:
    wire = Wire()
    wire.network.repeat_after_s = 3.0
    wire.up("message")
    wire.line.download(1, lambda: wire.note("fetched"))
    wire.clock.run()
    assert wire.arrived == [(1.0, "message"), (2.0, "fetched"), (4.0, "message")]


def test_damaged_bytes_are_sent_again() -> None:
    wire = Wire()
    wire.network.corrupts = True
    wire.line.upload(1, lambda: wire.note("bulk"))
    wire.clock.run(until=1.0)
    wire.network.corrupts = False
    wire.clock.run()
    assert wire.arrived == [(2.0 + RESEND_S + 2.0, "bulk")]


def test_a_partition_holds_one_direction_until_it_ends() -> None:
    wire = Wire()
    wire.network.held = {"up"}
    wire.up("up")
    wire.line.send_down(lambda: wire.note("down"))
    wire.clock.run(until=9.0)
    assert wire.arrived == [(1.0, "down")]
    wire.network.held = set()
    wire.line.release()
    assert wire.arrived[1:] == [(9.0, "up")]


@pytest.mark.parametrize("lingers", [False, True])
def test_after_a_cut_only_what_lingers_arrives(lingers: bool) -> None:
    wire = Wire()
    wire.up("up")
    wire.line.send_down(lambda: wire.note("down"))
    if lingers:
        wire.line.linger()
    wire.line.cut()
    wire.clock.run()
    assert wire.arrived == ([(1.0, "up")] if lingers else [])
