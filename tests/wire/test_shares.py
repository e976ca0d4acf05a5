"""One certificate's share of a bulk port: connections, threads, and requests.

A client of sockets and certificates alone holds it, so nothing here knows how the port
is made, but for names of its threads.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from wire_support import (
    ISLAND,
    WAIT_S,
    deadlines,
    fetch_request,
    framed,
    framed_chunk,
    hello,
    random_bytes,
    upload_start,
)

from diloco_jax.wire import addresses, encoding, limits, principal, session
from diloco_jax.wire import certificates as authority
from diloco_jax.wire.errors import Busy
from diloco_jax.wire.frames import BulkConnection
from diloco_jax.wire.principal import COORDINATOR, island
from diloco_jax.wire.tls import TlsFiles

SHARE = 2
"""Transfers of one host with one bulk channel: one each way."""
SMALL = {"bulk_channels": 1, "max_hosts": 3, "max_hosts_each": 1}
FLOOD = 40
FETCH = framed(fetch_request())


@pytest.fixture
def copy(certificates, tmp_path, monkeypatch) -> Path:
    """Certificates of a coordinator that looks at once which are revoked."""
    monkeypatch.setattr(principal, "READ_AGAIN_S", 0.0)
    return Path(shutil.copytree(certificates, tmp_path / "copy"))


@pytest.fixture
def port(serve, handlers, copy):
    """The address of a coordinator with a small share for each."""
    handlers.published = random_bytes(1000)
    _, address = serve(tls=TlsFiles.load(copy, COORDINATOR), **SMALL)
    return address


@pytest.fixture
def dial(port, copy):
    """Shakes hands with the bulk port with an island's key."""
    context = TlsFiles.load(copy, island(ISLAND)).client_context()
    target = addresses.parse_address(addresses.bulk_address(port))
    with contextlib.ExitStack() as stack:

        def secured(*parts: bytes) -> socket.socket:
            plain = stack.enter_context(socket.create_connection(target, WAIT_S))
            made = context.wrap_socket(plain, server_hostname=target[0])
            stack.callback(made.close)
            with contextlib.suppress(OSError):  # It may be closed already.
                made.sendall(b"".join(parts))
            return made

        yield secured


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


def until(happened) -> None:
    deadline = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def threads() -> int:
    """Count the threads of this process that serve transfers."""
    names = [thread.name for thread in threading.enumerate()]
    return sum(n.startswith("diloco-bulk-") and n[-1].isdigit() for n in names)


def said_to(connection: socket.socket):
    connection.settimeout(WAIT_S)
    return BulkConnection(connection, "coordinator").receive(encoding.bulk_reply)


@pytest.mark.parametrize(
    "parts",
    [(), (FETCH[:1],), (b"GET / HTTP/1.1\r\n\r\n",)],
    ids=["idle", "one byte", "garbage"],
)
def test_a_key_has_twice_its_share_of_connections_and_the_others_theirs(
    port, dial, connect, copy, parts
):
    """Whatever they are for: those beyond are closed at once."""
    before = threads()
    flood = [dial(*parts) for _ in range(FLOOD)]
    until(lambda: sum(map(is_open, flood)) <= 2 * SHARE)
    assert threads() <= before + 2 * SHARE
    other = connect(port, tls=TlsFiles.load(copy, island("other")), bulk_channels=1)
    request = fetch_request(island="other")
    began = time.monotonic()
    assert other.transfers.fetch(request, max_bytes=1000).payload
    assert time.monotonic() - began < deadlines().retry_max_s


def test_a_key_has_its_connections_again_once_it_ended_some(dial):
    for _ in range(2):
        held = [dial() for _ in range(2 * SHARE)]
        until(lambda: not is_open(dial()))
        for one in held:
            one.close()
        until(lambda: is_open(dial()))


def test_a_revoked_key_is_told_so_and_holds_no_thread(port, dial, copy):
    authority.revoke(copy, island(ISLAND))
    flood = [dial(FETCH[:1]) for _ in range(FLOOD)]
    assert said_to(flood[0]).code == "revoked"
    until(lambda: sum(map(is_open, flood)) <= 4)


def test_what_a_key_has_open_ends_when_it_is_revoked(dial, copy):
    """Idle connections are told why, and a transfer under way is cut."""
    idle, sending = dial(), dial(framed(upload_start(10)), framed_chunk(b"x"))
    assert is_open(idle)
    assert is_open(sending)
    authority.revoke(copy, island(ISLAND))
    assert said_to(idle).code == "revoked"
    until(lambda: not is_open(sending))


def test_requests_without_pause_wait(port, connect, copy, monkeypatch):
    """A peer has so many at once, and so many a second."""
    monkeypatch.setattr(limits, "REQUESTS_PER_SECOND", 0.0)
    monkeypatch.setattr(limits, "LEAST_REQUESTS", 4.0)
    monkeypatch.setattr(limits, "BURST_S", 1.0)
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
