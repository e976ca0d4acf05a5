"""All hosts of an island begin together, and those that are missing are named."""

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from diloco_jax.island.hosts import roll_call
from diloco_jax.island.hosts.meeting import WorldAddress
from diloco_jax.island.hosts.roll_call import GREETING, HERE, await_all
from diloco_jax.wire.addresses import parse_address, reserve

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(roll_call, "AGAIN_S", 0.05)


@pytest.fixture
def port():
    """None that a connection may be given before host 0 listens there."""
    address, beside = reserve("127.0.0.1:0")
    beside.close()
    return parse_address(address)[1]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def at(port, index):
    return WorldAddress(address=f"127.0.0.1:{port}", index=index)


def come(port, index):
    """Says a number as a host does; returns the connection."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            peer = socket.create_connection(("127.0.0.1", port), WAIT_S)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        else:
            peer.sendall(HERE.pack(GREETING, index))
            return peer


def test_hosts_begin_together_whoever_comes_first(port, pool):
    first = [pool.submit(await_all, at(port, index), 3, WAIT_S) for index in (2, 1)]
    time.sleep(0.2)
    assert not any(one.done() for one in first)
    await_all(at(port, 0), 3, WAIT_S)
    for one in first:
        one.result(WAIT_S)
    # The port is free again: jax listens there next.
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_host_0_names_those_that_are_missing(port, pool, monkeypatch):
    now, number = [0.0], roll_call._number

    def numbered(peer):
        now[0] = 1.0  # Time is over once host 2 is here.
        return number(peer)

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(roll_call, "time", clock)
    monkeypatch.setattr(roll_call, "_number", numbered)
    here = pool.submit(await_all, at(port, 2), 4, WAIT_S)
    with pytest.raises(
        TimeoutError,
        match=rf"hosts 1, 3 .* did not come at 127\.0\.0\.1:{port} within 1 s; .*log",
    ):
        await_all(at(port, 0), 4, 1.0)
    now[0] = WAIT_S
    with pytest.raises(TimeoutError, match=r"did not let host 2 in .*hosts_budget_s"):
        here.result(WAIT_S)


def test_who_died_meanwhile_has_to_come_again(port, pool):
    lead = pool.submit(await_all, at(port, 0), 3, WAIT_S)
    come(port, 1).close()
    with come(port, 2):
        time.sleep(0.3)
        assert not lead.done()
        await_all(at(port, 1), 3, WAIT_S)
    lead.result(WAIT_S)


def test_what_is_no_host_is_not_counted(port, pool):
    lead = pool.submit(await_all, at(port, 0), 2, WAIT_S)
    with come(port, 7), come(port, 0):
        pass
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert stranger.recv(1) == b""
        assert not lead.done()
    await_all(at(port, 1), 2, WAIT_S)
    lead.result(WAIT_S)


def test_a_port_that_is_taken_is_an_error(port):
    with socket.create_server(("", port)), pytest.raises(OSError, match="in use"):
        await_all(at(port, 0), 2, 1.0)


def test_a_host_waits_for_a_name_that_is_made_later(port, pool, monkeypatch):
    connect, known = socket.create_connection, threading.Event()

    def resolve(address, *rest):
        if not known.is_set():
            raise socket.gaierror(-2, "Name or service not known")
        return connect(("127.0.0.1", address[1]), *rest)

    monkeypatch.setattr(roll_call.socket, "create_connection", resolve)
    place = WorldAddress(address=f"pod-0.run:{port}", index=1)
    follower = pool.submit(await_all, place, 2, WAIT_S)
    lead = pool.submit(await_all, at(port, 0), 2, WAIT_S)
    time.sleep(0.2)
    assert not lead.done()
    known.set()
    lead.result(WAIT_S)
    follower.result(WAIT_S)


def test_each_host_learns_the_address_at_which_it_was_met(port, pool):
    """gloo listens there, whatever the machine's own name resolves to."""
    hosts = [pool.submit(await_all, at(port, index), 2, WAIT_S) for index in (1, 0)]
    assert [host.result(WAIT_S) for host in hosts] == ["127.0.0.1"] * 2
    near, far = SimpleNamespace(), SimpleNamespace()
    near.getsockname = lambda: ("127.0.0.1", 1)
    far.getsockname = lambda: ("::ffff:10.0.0.7", 1, 0, 0)
    assert roll_call._address_here(near, far) == "10.0.0.7"
