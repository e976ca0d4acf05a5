"""A link that is cut, slowed and delayed, between sockets of this process."""

import contextlib
import socket
import threading
import time

import pytest

from diloco_jax.chaos.relay import LEAST_CORRUPT_BYTES, Relay
from diloco_jax.wire import addresses

PATIENCE_S = 30.0
QUIET_S = 0.3
"""Seconds in which nothing must come. A slow machine cannot fail a test by it."""


@pytest.fixture
def joined():
    """Makes a relay, and the ends of a connection through it: (relay, the island's, the
    coordinator's)."""
    with contextlib.ExitStack() as stack:

        def joined(*, is_bulk=True, **link):
            address, bulk = addresses.reserve("127.0.0.1:0")
            ports = {False: addresses.listen(address), True: bulk}
            for port in ports.values():
                stack.enter_context(port)
                port.settimeout(PATIENCE_S)
            relay = Relay(address, **link)
            stack.callback(relay.close)
            to = addresses.bulk_address(relay.address) if is_bulk else relay.address
            dialled = addresses.parse_address(to)
            near = socket.create_connection(dialled, PATIENCE_S)
            stack.enter_context(near)
            far, _ = ports[is_bulk].accept()
            stack.enter_context(far)
            far.settimeout(PATIENCE_S)
            return relay, near, far

        yield joined


@pytest.fixture
def ends(joined):
    return joined()


def comes(sink, octets):
    found = b""
    while len(found) < len(octets):
        more = sink.recv(len(octets) - len(found))
        assert more, "it ended early"
        found += more
    return found == octets


def nothing_comes(sink):
    sink.settimeout(QUIET_S)
    with pytest.raises(TimeoutError):
        sink.recv(1)
    sink.settimeout(PATIENCE_S)
    return True


def test_bytes_pass_both_ways_and_so_does_the_end(ends):
    _, near, far = ends
    large = bytes(range(256)) * 40_000  # More than the relay holds.
    sending = threading.Thread(target=near.sendall, args=(large,))
    sending.start()
    assert comes(far, large)
    sending.join(PATIENCE_S)
    far.sendall(b"answer")
    assert comes(near, b"answer")
    near.shutdown(socket.SHUT_WR)
    assert far.recv(1) == b""
    far.sendall(b"more")  # The other half is still open.
    assert comes(near, b"more")


@pytest.mark.parametrize("cut", ["up", "down"])
def test_a_direction_that_is_cut_holds_its_bytes(ends, cut):
    relay, near, far = ends
    relay.set(**{cut: False})
    source, sink = (near, far) if cut == "up" else (far, near)
    source.sendall(b"held")
    assert nothing_comes(sink)
    sink.sendall(b"passes")
    assert comes(source, b"passes")
    relay.set()
    assert comes(sink, b"held")


@pytest.mark.parametrize(
    ("whole", "struck"),
    [
        ({}, {"delay_s": 0.3}),
        ({}, {"bytes_per_s": 100_000}),
        ({"bytes_per_s": 100_000}, {"bytes_per_s": 1e9}),
        ({"bytes_per_s": 100_000}, {}),
    ],
)
def test_delay_and_rate_take_their_time(joined, whole, struck):
    """A slow link is not made faster by a strike, nor once it is over."""
    relay, near, far = joined(**whole)
    relay.set(**struck)
    began = time.monotonic()
    near.sendall(bytes(30_000))
    assert comes(far, bytes(30_000))
    assert time.monotonic() - began >= 0.3


def test_what_a_slow_link_holds_comes_once_it_is_whole_again(ends):
    """At the rate that it had, the first bytes would take a minute."""
    relay, near, far = ends
    relay.set(bytes_per_s=1000)
    near.sendall(bytes(200_000))
    assert nothing_comes(far)
    relay.set()
    assert comes(far, bytes(200_000))


def test_corrupt_bulk_has_a_wrong_bit_and_messages_are_whole(ends):
    relay, near, far = ends
    relay.set(corrupt=True)
    near.sendall(b"message")
    assert comes(far, b"message")
    large = bytes(LEAST_CORRUPT_BYTES)
    near.sendall(large)
    found = b""
    while len(found) < len(large):
        found += far.recv(len(large))
    assert found.count(0) < len(large)
    relay.set()
    near.sendall(large)
    assert comes(far, large)


def test_control_is_never_corrupt(joined):
    relay, near, far = joined(is_bulk=False)
    relay.set(corrupt=True)
    near.sendall(bytes(LEAST_CORRUPT_BYTES))
    assert comes(far, bytes(LEAST_CORRUPT_BYTES))


def test_a_closed_relay_ends_its_connections_even_if_cut(ends):
    relay, near, far = ends
    relay.set(up=False, down=False)
    near.sendall(b"held")
    relay.close()
    with contextlib.suppress(ConnectionResetError):
        while far.recv(16):
            pass
    with contextlib.suppress(ConnectionResetError):
        assert near.recv(1) == b""


def test_a_coordinator_that_is_away_ends_the_connection():
    address, bulk = addresses.reserve("127.0.0.1:0")
    bulk.close()
    relay = Relay(address)
    try:
        to = addresses.parse_address(relay.address)
        with socket.create_connection(to, PATIENCE_S) as near:
            near.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionResetError):
                assert near.recv(1) == b""
    finally:
        relay.close()
