"""Places for transfers: how many, and what becomes of those beyond them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from wire_support import WAIT_S, deadlines, random_bytes, upload_start

from diloco_jax.wire import limits
from diloco_jax.wire.errors import (
    Busy,
)

MIB = 1 << 20
ONE_ATTEMPT = deadlines(retry_min_s=3 * WAIT_S)


def test_transfers_beyond_the_places_wait_then_are_busy_and_status_gets_through(
    serve, connect, handlers, monkeypatch
):
    server, address = serve(max_islands=1, max_hosts=1, bulk_channels=1)
    monkeypatch.setattr(server._bulk._slots, "_wait_s", 0.2)
    entered, leave = threading.Semaphore(0), threading.Event()
    original = handlers.upload_end

    def upload_end(start, place):
        entered.release()
        leave.wait(WAIT_S)
        return original(start, place)

    monkeypatch.setattr(handlers, "upload_end", upload_end)
    client = connect(address, bulk_channels=2)
    uploading = threading.Thread(
        target=client.transfers.upload,
        args=(upload_start(2 * MIB), bytes(2 * MIB)),
        daemon=True,
    )
    uploading.start()
    for _ in range(2):
        assert entered.acquire(timeout=WAIT_S)
    with pytest.raises(
        Busy,
        match=r"fragment 3 given up at byte 0, .*all 2 places .* were taken for 0\.2 s",
    ):
        connect(address, deadlines=ONE_ATTEMPT).transfers.upload(
            upload_start(10), bytes(10)
        )
    assert client.status(WAIT_S)["islands"]
    leave.set()
    uploading.join(WAIT_S)
    assert not uploading.is_alive()


def test_a_transfer_that_waits_gets_the_first_place_that_is_free():
    held, leave, order = threading.Event(), threading.Event(), []
    one = limits.TransferSlots(1, WAIT_S)

    def hold():
        with one.taken():
            held.set()
            leave.wait(WAIT_S)
            order.append("first")

    def wait():
        with one.taken():
            order.append("second")

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(hold)
        assert held.wait(WAIT_S)
        second = pool.submit(wait)
        leave.set()
        for done in (first, second):
            done.result(WAIT_S)
    assert order == ["first", "second"]
    with one.taken():
        """All places and waits have ended."""


def test_places_are_bounded_whatever_the_hosts_and_so_are_those_who_wait(monkeypatch):
    monkeypatch.setattr(limits, "MOST_SLOTS", 3)
    monkeypatch.setattr(limits, "MOST_WAITING", 2)
    few = limits.TransferSlots(2 * 4 * 64 * 64, WAIT_S)
    assert (few.count, few.threads) == (3, 5)
    holding, leave = threading.Semaphore(0), threading.Event()

    def transfer():
        with few.taken():
            holding.release()
            leave.wait(WAIT_S)

    with ThreadPoolExecutor(5) as pool:
        running = [pool.submit(transfer) for _ in range(5)]
        for _ in range(3):
            assert holding.acquire(timeout=WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while few._waiting._value and time.monotonic() < deadline:
            leave.wait(0.001)
        refused = r"all 3 places .* and 2 transfers wait"
        with pytest.raises(Busy, match=refused), few.taken():
            pytest.fail("there is no place")
        leave.set()
        for one in running:
            one.result(WAIT_S)
    assert (few._free._value, few._waiting._value) == (3, 2)


@pytest.mark.parametrize(
    ("hard", "expected", "told", "fit"),
    [
        (100_000, 20_512, False, 20_000),
        (5000, 5000, True, 5000 - limits.OTHER_FILES),
        (600, 600, True, 300),
    ],
)
def test_the_limit_on_open_files_follows_the_connections(
    monkeypatch, caplog, hard, expected, told, fit
):
    """Those that fit leave room for other files."""
    seen = [(512, hard)]
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: seen[-1])
    monkeypatch.setattr(limits.resource, "setrlimit", lambda _, new: seen.append(new))
    assert limits.allow_connections(20_000) == fit
    assert seen[-1] == (expected, hard)
    assert ("20000 connections" in caplog.text) == told
    limits.allow_connections(0)
    assert len(seen) == 2, "it is never lowered"


def test_every_host_of_an_island_has_places_of_its_own(
    serve, connect, handlers, monkeypatch
):
    hosts = 16
    _, address = serve(max_islands=1, max_hosts=hosts, bulk_channels=1)
    together = threading.Barrier(hosts)
    original = handlers.upload_end

    def upload_end(start, place):
        together.wait(WAIT_S)  # None is done before all have a place.
        return original(start, place)

    monkeypatch.setattr(handlers, "upload_end", upload_end)
    clients = [
        connect(address, deadlines=ONE_ATTEMPT, bulk_channels=1) for _ in range(hosts)
    ]
    with ThreadPoolExecutor(hosts) as pool:
        sent = [
            pool.submit(c.transfers.upload, upload_start(10), bytes(10))
            for c in clients
        ]
        for one in sent:
            one.result(WAIT_S)


def test_a_stripe_that_finds_the_peer_busy_comes_again_alone(
    serve, connect, handlers, monkeypatch
):
    _, address = serve()
    original, begun = handlers.upload_begin, []

    def upload_begin(start):
        begun.append(start.offset)
        if start.offset == 2 * MIB and begun.count(start.offset) < 3:
            raise Busy("the merge buffer is full")
        return original(start)

    monkeypatch.setattr(handlers, "upload_begin", upload_begin)
    payload = random_bytes(4 * MIB)
    client = connect(address, deadlines=deadlines(retry_min_s=0.1))
    client.transfers.upload(upload_start(4 * MIB), payload)
    assert handlers.stored == payload
    assert sorted(begun) == [0, MIB, *[2 * MIB] * 3, 3 * MIB]


def test_one_peer_cannot_take_all_places():
    few = limits.TransferSlots(4, 0.0, each=2)
    with few.taken("b"), few.taken("a"), few.taken("a"):
        with (
            pytest.raises(Busy, match="a has 2 transfers under way, the limit is 2"),
            few.taken("a"),
        ):
            pass
        with few.taken("b"):
            pass
    with few.taken("a"), few.taken("a"):
        assert set(few._own) == {"a"}, "who has none is forgotten"
    with few.taken(), few.taken(), few.taken(), few.taken():
        pass
