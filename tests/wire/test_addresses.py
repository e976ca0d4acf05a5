"""Addresses: parsing, TLS where it is needed, ports that cannot be bound."""

from __future__ import annotations

import errno
import re
import socket

import pytest

from diloco_jax.config import ConfigError
from diloco_jax.wire import addresses
from diloco_jax.wire.addresses import (
    format_address,
    is_loopback,
    on_this_machine,
    parse_address,
    require_free,
)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("coordinator.example:7077", "coordinator.example", 7077),
        ("[::1]:65535", "::1", 65535),
    ],
)
def test_address_round_trip(address, host, port):
    assert parse_address(address) == (host, port)
    assert format_address(host, port) == address


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":1", "::1:7077", "h:65536", "h:-1", "h:x", "[h]:1", "h:²"],
)
def test_malformed_address_is_named(address):
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        parse_address(address)


@pytest.mark.parametrize(
    ("bound", "reached"),
    [
        ("0.0.0.0:7077", "127.0.0.1:7077"),
        ("[::]:7077", "[::1]:7077"),
        ("10.0.0.1:7077", "10.0.0.1:7077"),
        ("name:7077", "name:7077"),
    ],
)
def test_all_addresses_are_reached_by_loopback(bound, reached):
    assert on_this_machine(bound) == reached


def test_all_ports_of_a_run_must_be_free_before_it_is_begun():
    found, beside = addresses.reserve("127.0.0.1:0")
    beside.close()
    taken = addresses.bulk_address(found)
    with addresses.listen(taken):
        with pytest.raises(ConfigError, match=f"{taken}: .* another process listens"):
            require_free(found)
        require_free(found, bulk=False)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
    ],
)
def test_loopback(host, loopback):
    assert is_loopback(host) is loopback


@pytest.mark.parametrize("address", ["0.0.0.0:0", "10.0.0.1:7077", "host:7077"])
def test_non_loopback_without_tls_is_refused_at_both_ends(serve, connect, address):
    with pytest.raises(ConfigError, match=r"diloco certs.*--insecure"):
        serve(bind=address)
    with pytest.raises(ConfigError, match=r"diloco certs.*--insecure"):
        connect(address)


def test_insecure_may_be_spelled_out(serve, connect):
    _, address = serve(bind="0.0.0.0:0", insecure=True)
    _, port = parse_address(address)
    assert connect(f"127.0.0.1:{port}").status(20.0)["islands"]


@pytest.mark.parametrize("bind", ["127.0.0.1", "localhost", "[::1]"])
def test_port_in_use(serve, bind):
    if bind == "[::1]" and not _has_ipv6():
        pytest.skip("no IPv6 on this machine")
    _, address = serve(bind=f"{bind}:0")
    with pytest.raises(ConfigError, match=r"Address already in use; .*another port"):
        serve(bind=address)


def test_any_free_port_is_one_whose_next_is_free_too(monkeypatch):
    """And no connection is given it while the coordinator is started again."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        offered = [port, port - 1, *addresses.PORTS]
        monkeypatch.setattr(addresses.secrets, "choice", lambda _: offered.pop(0))
        found, beside = addresses.reserve("127.0.0.1:0")
        with beside:
            _, control = parse_address(found)
            assert beside.getsockname()[1] == control + 1
            assert control in addresses.PORTS
            with pytest.raises(ConfigError, match="in use"):
                addresses.listen(addresses.bulk_address(found))
            addresses.listen(found).close()


def test_a_bulk_port_in_use_is_named(serve):
    found, beside = addresses.reserve("127.0.0.1:0")
    named = re.escape(addresses.bulk_address(found))
    with beside, pytest.raises(ConfigError, match=rf"{named}: Address already in use"):
        serve(bind=found)
    serve(bind=found)


def test_address_of_another_machine_cannot_be_bound(serve):
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0.*no address of this"):
        serve(bind="192.0.2.1:0", insecure=True)


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def test_a_machine_that_cannot_reach_itself_is_named(monkeypatch):
    addresses.require_loopback("127.0.0.1:7000")

    def fail(*args):
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1.*ip link set lo up"):
        addresses.require_loopback("127.0.0.1:7000")
    # Another machine is none of its business.
    addresses.require_loopback("192.0.2.1:7000")
