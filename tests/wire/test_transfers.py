"""Uploads and fetches: bytes, overhead, damage, bounds, resuming."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
from wire_support import (
    WAIT_S,
    Clock,
    Dribble,
    answer_to,
    deadlines,
    fetch_request,
    framed,
    framed_chunk,
    hello,
    random_bytes,
    report,
    upload_start,
)

from diloco_jax.protocol.messages import Version
from diloco_jax.wire import bulk, transfers
from diloco_jax.wire.errors import (
    Busy,
    ConnectionLost,
    LocalProtocolError,
    Refused,
    RemoteProtocolError,
    VersionGone,
)
from diloco_jax.wire.transfers import LEAST_BYTES, ReceiveBuffers

MIB = 1 << 20
ONE_ATTEMPT = deadlines(retry_min_s=3 * WAIT_S)


@pytest.mark.parametrize("secured", [False, True])
def test_upload_and_fetch_in_stripes(serve, connect, handlers, tls, secured):
    options = tls if secured else {"coordinator": None, "island": None}
    _, address = serve(tls=options["coordinator"])
    client = connect(address, tls=options["island"])
    payload = random_bytes(20 * MIB + 17)
    sent = client.transfers.upload(upload_start(len(payload)), payload)
    assert handlers.stored == payload
    assert len(payload) < sent < 1.001 * len(payload)
    lengths = sorted(handlers.next("stripe")[1] for _ in range(4))
    assert sum(lengths) == len(payload)
    assert lengths[-1] - lengths[0] <= 1
    array = np.arange(1000, dtype=np.float32).reshape(10, 100)
    client.transfers.upload(upload_start(array.nbytes), memoryview(array))
    assert handlers.stored == array.tobytes()


@pytest.mark.parametrize("size", [0, 1, MIB, 2 * MIB, 2 * MIB + 1, 20 * MIB + 17])
def test_fetch_in_stripes(serve, connect, handlers, size):
    _, address = serve()
    handlers.published = random_bytes(size)
    fetched = connect(address).transfers.fetch(fetch_request(), max_bytes=size)
    assert fetched.payload == handlers.published
    assert (fetched.version, fetched.count) == (Version(1, 5), 0)
    assert fetched.wire_bytes < 1.001 * size + 200
    rest = [request.offset for request in handlers.requests[1:]]
    assert len(rest) == {2 * MIB + 1: 1, 20 * MIB + 17: 4}.get(size, 0)


def test_what_lies_scattered_in_memory_is_fetched_row_by_row(serve, connect, handlers):
    _, address = serve()
    handlers.published = random_bytes(MIB)
    matrix = np.random.default_rng(0).integers(0, 256, (3000, 2000), np.uint8)
    handlers.scattered = [matrix[:, 500:].data, np.float32(1.5).reshape(()).data]
    expected = handlers.published + matrix[:, 500:].tobytes() + b"\0\0\xc0?"
    fetched = connect(address).transfers.fetch(fetch_request(), max_bytes=len(expected))
    assert fetched.payload == expected


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda f: f[:-1] + bytes([f[-1] ^ 1]), r"checksum \w{16}, expected \w{16}"),
        (lambda f: b"HTTP" + f[4:], "begins with b'HTTP', expected b'DLC2'"),
        (lambda f: framed_chunk(f[bulk.HEADER_BYTES :], 5), "offset 5, expected 0"),
        (lambda f: framed_chunk(bytes(MIB)), "announces 1048576 .* expected 1 to 1000"),
        (lambda f: framed_chunk(b""), "announces 0 bytes, expected 1 to 1000"),
    ],
)
def test_broken_chunk_is_refused_and_others_go_on(
    serve, connect, handlers, damage, cause
):
    _, address = serve()
    client = connect(address)
    stream = client.open_control(hello())
    handlers.next("connect")
    payload = random_bytes(1000)
    reply = answer_to(
        address, framed(upload_start(1000)), damage(framed_chunk(payload))
    )
    assert reply.kind == "LocalProtocolError"
    assert re.search(cause, reply.message)
    stream.send(report(1))
    handlers.next("receive")
    client.transfers.upload(upload_start(1000), payload)
    assert handlers.stored == payload


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ([framed(b"\xc1")], "cannot be understood"),
        ([framed(upload_start(10, offset=5))], "bytes 5 to 15 of .* 10"),
        (
            [framed(upload_start(10, length=-1))],
            "`int` >= 0 - at `.*length",
        ),
        ([b"GET / HTTP/1.1\r\n"], "begins with b'GET ', expected b'DLM1'; .* version"),
        ([bulk.message_header(MIB + 1)], "announces 1048577 bytes, expected 1 to"),
        ([bulk.message_header(0)], "announces 0 bytes, expected 1 to"),
        ([framed(hello())], "cannot be understood"),
        ([framed(fetch_request(offset=1))], "-1 bytes from 1 on, of a payload of 0"),
    ],
)
def test_requests_that_do_not_add_up(serve, parts, cause):
    _, address = serve()
    reply = answer_to(address, *parts)
    assert reply.kind == "LocalProtocolError"
    assert re.search(cause, reply.message)


@pytest.mark.parametrize("part", [b"", b"DLC", framed_chunk(bytes(10))[:-1]])
def test_an_upload_that_ends_too_soon_is_not_taken(serve, handlers, part):
    _, address = serve()
    with pytest.raises(ConnectionLost, match="ended the connection"):
        answer_to(address, framed(upload_start(10)), part)
    assert handlers.events.empty()


@pytest.mark.parametrize("size", [1000, 3 * MIB + 5])
def test_a_stripe_that_is_not_wanted_any_more_is_answered_and_leaves_nothing(
    serve, connect, handlers, monkeypatch, size
):
    """As after a lost answer; the connection serves the next transfer."""
    _, address = serve()
    begin, place = handlers.upload_begin, memoryview(bytearray(min(size, MIB)))
    client = connect(address, bulk_channels=1)
    monkeypatch.setattr(handlers, "upload_begin", lambda start: place)
    client.transfers.upload(upload_start(size), random_bytes(size))
    assert handlers.next("stripe") == (0, size)
    assert handlers.stored == b""
    with pytest.raises(ValueError, match="released"):
        place[0]
    monkeypatch.setattr(handlers, "upload_begin", begin)
    client.transfers.upload(upload_start(size), random_bytes(size))
    assert handlers.stored == random_bytes(size)


def test_a_refused_upload_is_not_sent_to_its_end(serve, connect, handlers):
    _, address = serve()
    handlers.refusal = Refused("fenced", "incarnation 2 is here")
    client, size = connect(address, bulk_channels=1), 400 * MIB
    connection = client.transfers._connections.take()
    client.transfers._connections.give(connection)
    with pytest.raises(Refused, match="incarnation 2"):
        client.transfers.upload(upload_start(size), np.zeros(size, np.uint8).data)
    assert connection.sent_bytes < size / 4


def test_a_message_larger_than_allowed_is_not_sent(serve, connect):
    _, address = serve()
    request = fetch_request(session="s" * (MIB + 1))
    with pytest.raises(LocalProtocolError, match=r"FetchRequest .* limit is 1048576"):
        connect(address).transfers.fetch(request, max_bytes=1)


def test_transfers_follow_one_another_on_their_connections(
    serve, connect, handlers, monkeypatch
):
    _, address = serve()
    client = connect(address, bulk_channels=2)
    connections, dialled = client.transfers._connections, []
    dial = connections._dial
    monkeypatch.setattr(
        connections, "_dial", lambda: dialled.append(dial()) or dialled[-1]
    )
    for _ in range(5):
        client.transfers.upload(upload_start(4 * MIB), bytes(4 * MIB))
    # One may do for both stripes, where the second begins after the first.
    assert 1 <= len(dialled) <= 2
    assert {connection for _, connection in connections._idle} == set(dialled)


def test_connections_that_only_a_burst_needed_are_closed(serve, connect, monkeypatch):
    _, address = serve()
    client = connect(address)
    connections, clock = client.transfers._connections, Clock()
    monkeypatch.setattr(transfers, "time", clock)
    burst = [connections.take() for _ in range(4)]
    for connection in burst:
        connections.give(connection)
    rest_s = deadlines().rest_s

    def one_after(seconds):
        clock.now += seconds
        client.transfers.upload(upload_start(1), b"1")
        return [connection.fileno() == -1 for connection in burst]

    assert one_after(0.9 * rest_s) == [False] * 4
    assert one_after(0.2 * rest_s) == [True, True, True, False]
    assert one_after(2 * rest_s) == [True, True, True, False]


def test_fetch_larger_than_allowed_is_refused_before_allocation(
    serve, connect, handlers
):
    _, address = serve()
    handlers.published = bytes(3 * MIB)
    with pytest.raises(RemoteProtocolError, match=r"3145728 bytes .* at most 100"):
        connect(address).transfers.fetch(fetch_request(), max_bytes=100)
    assert len(handlers.requests) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        Refused("fenced", "incarnation 2 is here"),
        Busy("the merge buffer is full"),
        RemoteProtocolError("fragment 3 has 8 bytes, 10000000 announced"),
    ],
)
def test_what_the_handlers_refuse_reaches_the_uploader(
    serve, connect, handlers, refusal
):
    _, address = serve()
    handlers.refusal = refusal
    # What is the peer's fault to the coordinator is this end's fault to the island.
    blamed = (
        LocalProtocolError
        if isinstance(refusal, RemoteProtocolError)
        else type(refusal)
    )
    client = connect(address, deadlines=ONE_ATTEMPT)
    with pytest.raises(blamed, match=str(refusal)) as error:
        client.transfers.upload(upload_start(10_000_000), bytes(10_000_000))
    assert getattr(error.value, "code", None) == getattr(refusal, "code", None)
    handlers.refusal = None
    client.transfers.upload(upload_start(10_000_000), bytes(10_000_000))


def test_announced_length_must_be_the_payloads(connect):
    with pytest.raises(LocalProtocolError, match="announces 10 bytes and has 9"):
        connect("127.0.0.1:1").transfers.upload(upload_start(10), bytes(9))


def test_fetch_resumes_at_the_byte_after_the_server_comes_back(
    serve, connect, handlers, monkeypatch
):
    server, address = serve()
    handlers.published = random_bytes(22 * MIB)
    client = connect(address, deadlines=deadlines(retry_min_s=0.1, retry_max_s=1.0))
    fetched = []
    fetching = threading.Thread(
        target=lambda: fetched.append(
            client.transfers.fetch(fetch_request(), max_bytes=22 * MIB)
        ),
        daemon=True,
    )
    dribble = Dribble(good=2)
    monkeypatch.setattr("diloco_jax.wire.bulk.chunks", dribble.chunks)
    fetching.start()
    for _ in range(4):  # each of the four stripes of 5 MiB
        assert dribble.reached.acquire(timeout=WAIT_S)
    monkeypatch.undo()
    server.stop(0.0)
    dribble.gone.set()
    before = len(handlers.requests)
    serve(bind=address)
    fetching.join(WAIT_S)
    assert fetched
    assert fetched[0].payload == handlers.published
    resumed = handlers.requests[before:]
    # A stripe goes on where it broke off: what was received is not sent again.
    assert all(r.offset > 2 * MIB and r.length <= 5 * MIB for r in resumed)
    assert sum(r.length for r in resumed) < 20 * MIB
    assert fetched[0].wire_bytes < 1.001 * 22 * MIB


def test_version_that_goes_away_in_mid_fetch(serve, connect, handlers, monkeypatch):
    _, address = serve()
    handlers.published = bytes(12 * MIB)
    original = handlers.fetch

    def fetch_once(request):
        if request.offset:
            handlers.version = Version(1, 6)
        return original(request)

    monkeypatch.setattr(handlers, "fetch", fetch_once)
    with pytest.raises(VersionGone, match="number=6"):
        connect(address).transfers.fetch(fetch_request(), max_bytes=12 * MIB)


def test_all_stripes_ask_for_the_version_of_the_first_answer(
    serve, connect, handlers, monkeypatch
):
    _, address = serve()
    handlers.published = random_bytes(12 * MIB)
    original = handlers.fetch

    def newest_at_first(request):
        if not request.offset:
            request = fetch_request(want=handlers.version)
        return original(request)

    monkeypatch.setattr(handlers, "fetch", newest_at_first)
    request = fetch_request(want=Version(1, 4))
    fetched = connect(address).transfers.fetch(request, max_bytes=12 * MIB)
    assert fetched.version == Version(1, 5)
    assert fetched.payload == handlers.published
    assert {r.want for r in handlers.requests} == {Version(1, 5)}


# ---- memory of fetched payloads: used again when it is free, and not before ----------


SIZE = 2 * LEAST_BYTES


def place(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_memory_is_lent_again_once_the_last_view_is_gone():
    memory = ReceiveBuffers()
    first = memory.lend(SIZE)
    where, part = place(first), np.frombuffer(first[5:], np.uint8)[3:]
    part[:] = 1
    del first
    other = memory.lend(SIZE)
    other[:] = bytes(SIZE)
    assert place(other) != where
    assert part.all()
    del part
    again = memory.lend(SIZE - 7)
    assert (place(again), len(again)) == (where, SIZE - 7)
    del other, again
    assert len(memory._free) == 1, "one at most"
    assert len(memory.lend(2 * SIZE)) == 2 * SIZE


# ---- ends: at deadlines, and with the client -----------------------------------------


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
    monkeypatch.setattr("diloco_jax.wire.bulk.chunks", dribble.chunks)
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
