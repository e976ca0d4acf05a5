"""The bulk port's connections: idle ones, stalled ones, those of strangers, its end."""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from wire_support import (
    ISLAND,
    WAIT_S,
    Clock,
    deadlines,
    fetch_request,
    framed,
    framed_chunk,
    hello,
    random_bytes,
    until,
    upload_start,
)

from diloco_jax.wire import addresses, bulk, bulk_server, peers, session
from diloco_jax.wire import certificates as authority
from diloco_jax.wire import server as server_module
from diloco_jax.wire.bulk import BulkConnection, UploadDone
from diloco_jax.wire.errors import Busy, RemoteProtocolError
from diloco_jax.wire.peers import COORDINATOR, island
from diloco_jax.wire.tls import TlsFiles

MIB = 1 << 20


@pytest.fixture
def dial():
    """Connects to a bulk port; closes what it connected after the test."""
    with contextlib.ExitStack() as stack:

        def connected(address):
            target = addresses.parse_address(addresses.bulk_address(address))
            return stack.enter_context(socket.create_connection(target, WAIT_S))

        yield connected


def ended(connection):
    """The server closed a connection; at once, if it had not read all of it."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(MIB):
            pass
    return True


def tick(clock, watch):
    """Lets a tenth of a second go by, and the watch see it."""
    clock.now += 0.1
    with watch._condition:
        watch._condition.notify()


@pytest.mark.parametrize(
    ("parts", "limits"),
    [
        ([framed(upload_start(10))], {"idle_s": 0.1}),
        ([framed(upload_start(10)), framed_chunk(bytes(10))[:-1]], {"idle_s": 0.1}),
        ([framed(upload_start(10))[:5]], {"connect_s": 0.1}),
    ],
)
def test_server_breaks_off_a_peer_that_stalls(
    serve, dial, clock, monkeypatch, parts, limits
):
    """It holds a place for so long, and no longer."""
    server, address = serve(deadlines=deadlines(**limits))
    begun = threading.Event()
    receive = BulkConnection._receive

    def receiving(connection, place):
        if connection.peer != "me":
            begun.set()
        receive(connection, place)

    monkeypatch.setattr(BulkConnection, "_receive", receiving)
    connection = dial(address)
    connection.sendall(b"".join(parts))
    assert begun.wait(WAIT_S)
    places = server._bulk._slots
    until(
        lambda: places._free._value == places.count,
        lambda: tick(clock, server._bulk._watch),
    )
    assert ended(connection)


def test_a_peer_that_is_slow_is_served_as_long_as_something_moves(
    serve, handlers, dial, clock, monkeypatch
):
    server, address = serve(deadlines=deadlines(idle_s=1.0))
    touched, touch = threading.Semaphore(0), peers.Guard.touch
    monkeypatch.setattr(
        peers.Guard, "touch", lambda guard: (touch(guard), touched.release())
    )
    connection = dial(address)
    connection.sendall(framed(upload_start(4)))
    for offset in range(4):
        connection.sendall(framed_chunk(b"x", offset))
        assert touched.acquire(timeout=WAIT_S)
        seen = threading.Event()
        with server._bulk._watch.guard(0.6, seen.set):
            clock.now += 0.6
            tick(clock, server._bulk._watch)
            assert seen.wait(WAIT_S)
    reply = BulkConnection(connection, "coordinator").receive(bulk.bulk_reply)
    assert reply == UploadDone(complete=True)


def test_a_peer_that_does_not_hang_up_is_closed_and_holds_no_thread(serve, dial, still):
    server, address = serve()
    connection = dial(address)
    connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
    reply = BulkConnection(connection, "coordinator").receive(bulk.bulk_reply)
    assert reply.kind == "LocalProtocolError"
    until(lambda: not server._bulk._acceptor._serving)
    connection.sendall(bytes(MIB))
    still.now += deadlines().retry_max_s
    server._bulk._acceptor._ring()
    connection.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionResetError):
        assert not connection.recv(1)


def test_a_handler_that_fails_ends_only_its_transfer(
    serve, connect, handlers, monkeypatch
):
    _, address = serve()
    client = connect(address)
    with monkeypatch.context() as patched:
        patched.setattr(handlers, "fetch", lambda request: {}["bug"])
        with pytest.raises(RemoteProtocolError, match=r"\(KeyError\); see its log"):
            client.transfers.fetch(fetch_request(), max_bytes=8)
    client.transfers.upload(upload_start(8), b"12345678")


@pytest.fixture
def still(monkeypatch):
    """The clock of handshakes."""
    clock = Clock()
    monkeypatch.setattr(bulk_server, "time", clock)
    return clock


def test_a_peer_that_never_shakes_hands_is_closed_and_holds_up_nobody(
    serve, connect, dial, tls, still
):
    _, address = serve(tls=tls["coordinator"])
    silent, client = dial(address), connect(address, tls=tls["island"])
    client.transfers.upload(upload_start(8), b"12345678")
    still.now += deadlines().connect_s
    assert ended(silent)


def test_the_oldest_connection_makes_room_for_a_new_one(serve, connect, dial):
    server, address = serve()
    server._bulk._acceptor._most = 2
    first, *_ = (dial(address) for _ in range(3))
    assert ended(first)
    connect(address).transfers.upload(upload_start(8), b"12345678")


def test_a_flood_of_handshakes_is_bounded_and_shuts_nobody_out(
    serve, connect, dial, tls, still, caplog
):
    """More strangers than there are places; half of them speak no TLS."""
    server, address = serve(tls=tls["coordinator"])
    accepting = server._bulk._acceptor
    accepting._most = 8
    client = connect(address, tls=tls["island"], bulk_channels=1)
    client.transfers.upload(upload_start(8), b"12345678")
    until(lambda: len(accepting._idle) == 1)
    strangers = []
    for number in range(100):
        strangers.append(dial(address))
        if number % 2:
            strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert len(accepting._shaking) + len(accepting._idle) <= 8
        assert len(accepting._idle) == 1, "handshakes make room first"
    client.transfers.upload(upload_start(8), b"12345678")
    connect(address, tls=tls["island"]).transfers.upload(upload_start(8), bytes(8))
    assert all(ended(stranger) for stranger in strangers[:80])
    lines = [r for r in caplog.records if r.name == bulk_server.__name__]
    assert len(lines) == 1, "one line a minute, however many there are"


def test_a_transfer_that_broke_off_is_told_and_a_connection_put_away_is_not(
    serve, connect, dial, caplog
):
    server, address = serve()
    with caplog.at_level(logging.INFO, bulk_server.__name__):
        client = connect(address, bulk_channels=1)
        client.transfers.upload(upload_start(8), b"12345678")
        client.close()
        until(lambda: not server._bulk._acceptor._known)
        assert not caplog.text
        broken = dial(address)
        broken.sendall(framed(upload_start(8)))
        broken.close()
        until(lambda: "a transfer broke off: 127.0.0.1:" in caplog.text)


@pytest.fixture
def full(monkeypatch):
    """Once lets the process be out of files as a server accepts a connection."""
    accept, errors = socket.socket.accept, []

    def accepted(listener, server):
        if errors and listener is server._bulk._acceptor._listener:
            raise errors.pop()
        return accept(listener)

    def once(server):
        errors.append(OSError(errno.EMFILE, "Too many open files"))
        monkeypatch.setattr(
            socket.socket, "accept", lambda this: accepted(this, server)
        )
        return errors

    return once


def test_a_port_without_files_drops_the_oldest_handshake(
    serve, connect, dial, tls, still, full
):
    server, address = serve(tls=tls["coordinator"])
    silent = dial(address)
    until(lambda: len(server._bulk._acceptor._shaking) == 1)
    errors = full(server)
    connect(address, tls=tls["island"]).transfers.upload(upload_start(8), bytes(8))
    assert not errors
    assert ended(silent)


def test_control_closes_who_never_shakes_hands_and_has_a_limit(serve, connect, tls):
    server, address = serve(
        tls=tls["coordinator"], deadlines=deadlines(connect_s=1.0), max_islands=1
    )
    target = addresses.parse_address(address)
    options = dict(server_module.server_options(deadlines(), 2 * server._max_sessions))
    limit = options["grpc.max_allowed_incoming_connections"]
    assert limit == 68
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(target, WAIT_S))
            for _ in range(limit + 20)
        ]
        assert all(ended(stranger) for stranger in silent)
        assert connect(address, tls=tls["island"]).status(WAIT_S)


def test_a_request_that_came_with_another_is_answered_too(serve, handlers, dial, tls):
    """It is in OpenSSL's memory then, and the socket has nothing to tell."""
    _, address = serve(tls=tls["coordinator"])
    context = tls["island"].client_context()
    with context.wrap_socket(dial(address), server_hostname="127.0.0.1") as secured:
        secured.sendall(2 * framed(fetch_request()))
        peer = BulkConnection(secured, "coordinator")
        for _ in range(2):
            assert peer.receive(bulk.bulk_reply).total == 0


def test_who_speaks_during_a_fetch_ends_it(serve, handlers, dial):
    _, address = serve()
    handlers.published = b"12345678"
    connection = dial(address)
    connection.sendall(2 * framed(fetch_request()))
    reply = BulkConnection(connection, "coordinator").receive(bulk.bulk_reply)
    assert reply.total == 8
    with contextlib.suppress(ConnectionResetError):
        assert not connection.recv(1)


def test_what_fails_on_one_connection_closes_it_and_no_other(
    serve, connect, dial, caplog, full
):
    server, address = serve()
    accepting = server._bulk._acceptor
    failing = [ValueError("a bug"), OSError("a file that is missing")]
    accepting._context = lambda: None if not failing else throw(failing.pop(0))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert ended(dial(address))
        until(lambda: "diloco-bulk failed on a connection" in caplog.text)
        until(lambda: "a file that is missing" in caplog.text)
    full(server)
    connect(address).transfers.upload(upload_start(8), b"12345678")
    assert "could not be accepted: [Errno 24] Too many open files" in caplog.text


def throw(error):
    raise error


def test_a_transfer_under_way_may_end_within_the_grace(
    serve, connect, handlers, monkeypatch
):
    server, address = serve()
    entered, leave, end = threading.Event(), threading.Event(), handlers.upload_end

    def upload_end(start, place):
        entered.set()
        assert leave.wait(WAIT_S)
        return end(start, place)

    monkeypatch.setattr(handlers, "upload_end", upload_end)
    client = connect(address)
    with ThreadPoolExecutor(2) as pool:
        sent = pool.submit(client.transfers.upload, upload_start(8), b"12345678")
        assert entered.wait(WAIT_S)
        stopped = pool.submit(server.stop, 2 * WAIT_S)
        until(lambda: server._bulk._acceptor._changed._waiters or stopped.done())
        leave.set()
        assert sent.result(WAIT_S) > 8
        stopped.result(WAIT_S)
    assert not server._bulk._acceptor._serving


def test_a_transfer_under_way_is_cut_off_after_the_grace(serve, handlers, dial):
    server, address = serve()
    handlers.published = bytes(64 * MIB)  # More than buffers of sockets hold.
    connection, received = dial(address), 0
    connection.sendall(framed(fetch_request()))
    until(lambda: handlers.requests)
    server.stop(0.0)
    while part := connection.recv(MIB):
        received += len(part)
    assert received < len(handlers.published)


def test_the_end_leaves_nothing_open(serve, connect, dial, tls, still):
    server, address = serve(tls=tls["coordinator"])
    accepting = server._bulk._acceptor
    client = connect(address, tls=tls["island"], bulk_channels=1)
    client.transfers.upload(upload_start(8), b"12345678")
    silent = dial(address)
    until(lambda: accepting._idle and accepting._shaking)
    (idle,), (shaking,) = accepting._idle, accepting._shaking
    ours, theirs = socket.socketpair()
    with accepting._changed:
        accepting._back.append(BulkConnection(theirs, "them"))
    server.stop(0.0)
    assert ended(silent)
    with ours:
        assert ended(ours)
    sockets = (accepting._listener, accepting._awake, accepting._alarm, theirs)
    assert {one.fileno() for one in (*sockets, idle, shaking)} == {-1}
    assert accepting._selector.get_map() is None


# ---- one certificate's share: connections, threads, and requests ---------------------

SHARE = 2
"""Transfers of one host with one bulk channel: one each way."""
SMALL = {"bulk_channels": 1, "max_hosts": 3, "max_hosts_each": 1}
FLOOD = 40
FETCH = framed(fetch_request())


@pytest.fixture
def port(serve, handlers, copy, at_once):
    """The address of a coordinator with a small share for each."""
    handlers.published = random_bytes(1000)
    _, address = serve(tls=TlsFiles.load(copy, COORDINATOR), **SMALL)
    return address


@pytest.fixture
def secured(port, copy):
    """Shakes hands with the bulk port with an island's key."""
    context = TlsFiles.load(copy, island(ISLAND)).client_context()
    target = addresses.parse_address(addresses.bulk_address(port))
    with contextlib.ExitStack() as stack:

        def dialled(*parts: bytes) -> socket.socket:
            plain = stack.enter_context(socket.create_connection(target, WAIT_S))
            made = context.wrap_socket(plain, server_hostname=target[0])
            stack.callback(made.close)
            with contextlib.suppress(OSError):  # It may be closed already.
                made.sendall(b"".join(parts))
            return made

        yield dialled


def is_open(connection: socket.socket) -> bool:
    """Tell if the other end has not closed it, whatever else it said."""
    connection.settimeout(0.0)
    try:
        while connection.recv(1 << 16):
            pass
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False
    return False


def serving() -> int:
    """Count the threads of this process that serve transfers."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(n.startswith("diloco-bulk-") and n[-1].isdigit() for n in names)


def said_to(connection: socket.socket):
    connection.settimeout(WAIT_S)
    return BulkConnection(connection, "coordinator").receive(bulk.bulk_reply)


@pytest.mark.parametrize(
    "parts",
    [(), (FETCH[:1],), (b"GET / HTTP/1.1\r\n\r\n",)],
    ids=["idle", "one byte", "garbage"],
)
def test_a_key_has_twice_its_share_of_connections_and_the_others_theirs(
    port, secured, connect, copy, parts
):
    """Whatever they are for: those beyond are closed at once."""
    before = serving()
    flood = [secured(*parts) for _ in range(FLOOD)]
    until(lambda: sum(map(is_open, flood)) <= 2 * SHARE)
    assert serving() <= before + 2 * SHARE
    other = connect(port, tls=TlsFiles.load(copy, island("other")), bulk_channels=1)
    request = fetch_request(island="other")
    began = time.monotonic()
    assert other.transfers.fetch(request, max_bytes=1000).payload
    assert time.monotonic() - began < deadlines().retry_max_s


def test_a_key_has_its_connections_again_once_it_ended_some(secured):
    for _ in range(2):
        held = [secured() for _ in range(2 * SHARE)]
        until(lambda: not is_open(secured()))
        for one in held:
            one.close()
        until(lambda: is_open(secured()))


def test_a_revoked_key_is_told_so_and_holds_no_thread(port, secured, copy):
    authority.revoke(copy, island(ISLAND))
    flood = [secured(FETCH[:1]) for _ in range(FLOOD)]
    assert said_to(flood[0]).code == "revoked"
    until(lambda: sum(map(is_open, flood)) <= 4)


def test_what_a_key_has_open_ends_when_it_is_revoked(secured, copy):
    """Idle connections are told why, and a transfer under way is cut."""
    idle, sending = secured(), secured(framed(upload_start(10)), framed_chunk(b"x"))
    assert is_open(idle)
    assert is_open(sending)
    authority.revoke(copy, island(ISLAND))
    assert said_to(idle).code == "revoked"
    until(lambda: not is_open(sending))


def test_requests_without_pause_wait(port, connect, copy, monkeypatch):
    """A peer has so many at once, and so many a second."""
    monkeypatch.setattr(peers, "REQUESTS_PER_SECOND", 0.0)
    monkeypatch.setattr(peers, "LEAST_REQUESTS", 4.0)
    monkeypatch.setattr(peers, "BURST_S", 1.0)
    client = connect(port, tls=TlsFiles.load(copy, island(ISLAND)), bulk_channels=1)
    began = time.monotonic()
    for _ in range(6):
        client.transfers.fetch(fetch_request(), max_bytes=1000)
    assert time.monotonic() - began >= 0.4, "two more than at once, at 4 a second"


def test_a_stream_without_a_thread_is_put_off(serve, connect, monkeypatch):
    _, address = serve()

    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    client = connect(address)
    with monkeypatch.context() as patched:
        none_left = SimpleNamespace(Thread=Refused, Lock=threading.Lock)
        patched.setattr(session, "threading", none_left)
        with pytest.raises(Busy, match="no thread for this stream"):
            client.open_control(hello())
    assert client.open_control(hello()).welcome.run_id == "r"
