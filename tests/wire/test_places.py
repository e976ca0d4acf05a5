"""Places for transfers: how many, and what becomes of those beyond them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from wire_support import WAIT_S, deadlines, random_bytes, upload_start

from diloco_jax.wire.errors import (
    Busy,
)

MIB = 1 << 20
ONE_ATTEMPT = deadlines(retry_min_s=3 * WAIT_S)


def test_transfers_beyond_the_places_are_busy_and_status_gets_through(
    serve, connect, handlers, monkeypatch
):
    _, address = serve(max_islands=1, max_hosts=1, bulk_channels=1)
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
    with pytest.raises(Busy, match="transfers are taken"):
        connect(address, deadlines=ONE_ATTEMPT).transfers.upload(
            upload_start(10), bytes(10)
        )
    assert client.status(WAIT_S)["islands"]
    leave.set()
    uploading.join(WAIT_S)
    assert not uploading.is_alive()


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
