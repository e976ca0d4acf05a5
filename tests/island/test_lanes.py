"""The addresses of workers and of a standby, as an island follows them."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from diloco_jax.deadlines import Deadlines
from diloco_jax.island.network.lanes import Lanes
from diloco_jax.protocol.values import Version
from diloco_jax.wire.bulk import FetchRequest
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import Busy, ConnectionLost, Refused

FIRST, SECOND = ("127.0.0.1:1", "127.0.0.1:3"), ("127.0.0.1:1", "127.0.0.1:5")


def test_an_island_leaves_the_workers_of_a_lead_that_ended_and_tells_its_hosts():
    moved = []
    coordinator = Client(
        "127.0.0.1:7", tls=None, deadlines=Deadlines(1.0), bulk_channels=1
    )
    with contextlib.closing(coordinator):
        lanes = Lanes(coordinator, (10, 30, 20))
        lanes.moved = moved.append
        lanes.use(())
        assert (moved, lanes.dealt) == ([], ())
        lanes.use(FIRST)
        lanes.use(FIRST)
        assert lanes.dealt == (1, 0, 1)
        stayed, left = (coordinator.transfers_at(a, w) for w, a in enumerate(FIRST))
        lanes.use(SECOND)
        assert moved == [FIRST, SECOND]
        assert coordinator.transfers_at(SECOND[0], 0) is stayed
        with pytest.raises(ConnectionLost, match="closed"):
            left.fetch(
                FetchRequest(
                    run_id="r",
                    island="a",
                    incarnation=1,
                    session="s",
                    fragment=0,
                    want=Version(1, 1),
                    have=None,
                ),
                max_bytes=8,
            )


class Server:
    """A coordinator or its standby: what it answers is a test's."""

    def __init__(self, error=None, workers=()):
        self.error, self.asked = error, []
        self.transfers, self.workers = self, workers
        self.left = ()

    def open_control(self, hello):
        self.asked.append("hello")
        if self.error is not None:
            raise self.error
        return SimpleNamespace(welcome=SimpleNamespace(workers=self.workers))

    def fetch(self, request, *, max_bytes, stall_s):
        self.asked.append("fetch")
        self.stall_s = stall_s
        if self.error is not None:
            raise self.error
        return "fetched"

    def interrupt(self):
        self.asked.append("interrupt")

    def transfers_at(self, address, worker):
        self.at = address
        return self

    def leave_others(self, kept):
        self.left = kept


def fetch(lanes):
    return lanes.fetch(SimpleNamespace(fragment=0), max_bytes=1)


def test_hellos_alternate_until_one_server_says_welcome():
    primary, standby = Server(), Server(Busy("standby"))
    lanes = Lanes(primary, (10,), standby, mandate_s=4.0)
    lanes.open_control("hello")
    assert fetch(lanes) == "fetched"
    assert (primary.stall_s, standby.asked) == (4.0, ["interrupt"])
    standby.asked.clear()
    primary.error = ConnectionLost("dead")
    for error in (ConnectionLost, Busy, ConnectionLost):
        with pytest.raises(error):
            lanes.open_control("hello")
    standby.error = None
    lanes.open_control("hello")
    lanes.open_control("hello")
    assert fetch(lanes) == "fetched"
    assert standby.asked == ["hello", "hello", "hello", "fetch"]
    # One that is stopped would not answer what is under way.
    assert primary.asked[-2:] == ["interrupt", "interrupt"]


def test_the_workers_of_a_lead_that_was_replaced_are_left():
    """They serve on, and what they take in is lost."""
    primary, standby = Server(workers=FIRST), Server(workers=SECOND)
    lanes = Lanes(primary, (10,), standby)
    lanes.open_control("hello")
    assert (fetch(lanes), primary.at, primary.left) == ("fetched", FIRST[0], FIRST)
    primary.error = ConnectionLost("dead")
    with pytest.raises(ConnectionLost):
        lanes.open_control("hello")
    lanes.open_control("hello")
    assert (fetch(lanes), standby.at) == ("fetched", SECOND[0])
    assert primary.left == standby.left == SECOND


def test_a_host_with_a_control_stream_does_not_guess_who_serves():
    primary, standby = Server(), Server()
    lanes = Lanes(primary, (10,), standby)
    lanes.open_control("hello")
    primary.error = ConnectionLost("a moment")
    for _ in range(3):
        with pytest.raises(ConnectionLost):
            fetch(lanes)
    assert standby.asked == ["interrupt"]


def test_a_host_without_a_control_stream_finds_who_serves():
    primary, standby = Server(ConnectionLost("dead")), Server()
    lanes = Lanes(primary, (10,), standby)
    with pytest.raises(ConnectionLost):
        fetch(lanes)
    assert fetch(lanes) == "fetched"
    standby.error = Refused("not_awaited", "no")
    with pytest.raises(Refused):
        fetch(lanes)
    with pytest.raises(Refused):
        fetch(lanes)


def test_without_a_standby_the_coordinator_is_tried_again():
    lanes = Lanes(Server(ConnectionLost("dead")), (10,), mandate_s=4.0)
    for _ in range(3):
        with pytest.raises(ConnectionLost):
            fetch(lanes)
        with pytest.raises(ConnectionLost):
            lanes.open_control("hello")


@pytest.mark.parametrize("error", [Busy, ConnectionLost])
def test_a_host_without_a_control_stream_stays_while_a_worker_is_busy(error):
    """That says nothing of the lead: who leads now has told where its workers are."""
    primary, standby = Server(error("a moment")), Server()
    lanes = Lanes(primary, (10,), standby)
    lanes.use(FIRST)
    for _ in range(3):
        with pytest.raises(error):
            fetch(lanes)
    primary.error = None
    assert (fetch(lanes), primary.at, standby.asked) == ("fetched", FIRST[0], [])
