"""Transfers end at their deadlines, and with their client."""

from __future__ import annotations

import threading
import time

import pytest
from wire_support import WAIT_S, Dribble, deadlines, fetch_request, upload_start

from diloco_jax.wire.errors import ConnectionLost

MIB = 1 << 20


def test_fetch_gives_up_at_its_deadline(connect):
    client = connect("127.0.0.1:1", deadlines=deadlines(pin_s=1.2))
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=r"given up at byte 0, 1\.2 s after"):
        client.transfers.fetch(fetch_request(), max_bytes=1)
    assert time.monotonic() - began < WAIT_S


def test_client_breaks_off_a_stalled_upload(serve, connect, handlers, monkeypatch):
    _, address = serve()
    hangs = threading.Event()
    monkeypatch.setattr(handlers, "upload_end", lambda *_: hangs.wait(WAIT_S))
    client = connect(address, deadlines=deadlines(idle_s=0.5))
    with pytest.raises(ConnectionLost, match=r"not 64 KiB moved for 0\.5 s"):
        client.transfers.upload(upload_start(10), bytes(10))
    hangs.set()


def test_close_ends_running_transfers(serve, connect, handlers, monkeypatch):
    _, address = serve()
    handlers.published = bytes(12 * MIB)
    dribble = Dribble(good=1)
    monkeypatch.setattr("diloco_jax.wire.frames.chunks", dribble.chunks)
    client = connect(address)
    errors = []

    def fetch():
        try:
            client.transfers.fetch(fetch_request(), max_bytes=12 * MIB)
        except ConnectionLost as error:
            errors.append(error)

    fetching = threading.Thread(target=fetch, daemon=True)
    fetching.start()
    assert dribble.reached.acquire(timeout=WAIT_S)
    began = time.monotonic()
    client.close()
    fetching.join(WAIT_S)
    assert time.monotonic() - began < WAIT_S
    assert errors
    dribble.gone.set()
    with pytest.raises(ConnectionLost, match="closed"):
        client.transfers.fetch(fetch_request(), max_bytes=1)
