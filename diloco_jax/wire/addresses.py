"""HOST:PORT: parsing it, and which addresses may be served without TLS."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket

from diloco_jax.errors import ConfigError

LAST_PORT = 65535
_TRIES = 50
PORTS = range(20_000, 32_000)
"""Ports that are tried for port 0. Linux and macOS give none of them to an outgoing
connection, so a restarted coordinator finds its ports free."""


def parse_address(address: str, field: str = "") -> tuple[str, int]:
    """Parse `HOST:PORT` or `[IPv6]:PORT` into (host without brackets, port).

    Raises ConfigError naming the address, and the field or option if that is given.
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    valid = (
        colon and host and port.isascii() and port.isdigit() and int(port) <= LAST_PORT
    )
    if not valid or (":" in host) != bracketed:
        of = f"{field}: " if field else ""
        raise ConfigError(
            f"{of}address {address!r} is not HOST:PORT with a port from 0 to 65535; "
            f"write 10.0.0.1:7077, name:7077 or [::1]:7077"
        )
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """Format host and port as HOST:PORT, the inverse of `parse_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bulk_address(address: str) -> str:
    """Return the address of the bulk port beside a coordinator's: the next port of the
    same host. Raises ConfigError if there is none."""
    host, port = parse_address(address)
    if port == LAST_PORT:
        raise ConfigError(
            f"address {address} leaves no port for bulk, which is served at the next "
            f"one; give a port below {LAST_PORT}"
        )
    return format_address(host, port + 1)


def on_this_machine(address: str) -> str:
    """Return the address at which this machine reaches a server that is bound to
    `address`. A server on all addresses (0.0.0.0, [::]) listens on loopback, too."""
    host, port = parse_address(address)
    if not is_unspecified(host):
        return address
    return format_address("::1" if ":" in host else "127.0.0.1", port)


def is_unspecified(host: str) -> bool:
    """Tell if a server at `host` listens on all addresses of its machine."""
    ip = _ip(host)
    return ip is not None and ip.is_unspecified


def source_of(address: str) -> str:
    """Return the address of this machine from which it reaches HOST:PORT; nothing is
    sent. Raises ConfigError if there is no way, or the name is not known."""
    host, port = parse_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        family, kind, _, _, where = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"nothing leads from this machine to {address} ({error.strerror}); check "
            f"the address, or say with --serve where others reach this island"
        ) from error


def is_loopback(host: str) -> bool:
    """Tell if only this machine can reach `host`. Names are not looked up."""
    ip = _ip(host)
    return host == "localhost" if ip is None else ip.is_loopback


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def require_tls(address: str, *, tls: bool, insecure: bool) -> None:
    """Raise ConfigError if the address needs TLS and neither certificates nor
    `insecure` are given."""
    host, _ = parse_address(address)
    if not (tls or insecure or is_loopback(host)):
        raise ConfigError(
            f"address {address} is not loopback and no certificates are given: "
            f"anyone could read and change the model; make them with `diloco certs` "
            f"and give their folder, or spell out --insecure"
        )


def resolve(address: str) -> str:
    """Return the one numeric address that a server binds; ConfigError if there is none.

    A name may stand for several addresses. Binding the name would bind only some of
    them if one is in use.
    """
    host, port = parse_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"cannot bind {address}: {host!r} is not an address or a known name "
            f"({error.strerror}); give an address of this machine"
        ) from error
    numeric = min(found, key=lambda entry: entry[0] != socket.AF_INET)[4]
    return format_address(str(numeric[0]), port)


def require_free(address: str, *, bulk: bool = True) -> None:
    """Raise ConfigError if `address` or, for `bulk`, the port after it cannot be bound;
    called before a run is begun."""
    wanted = [address]
    if bulk and parse_address(address)[1]:
        wanted.append(bulk_address(address))
    for each in wanted:
        listen(resolve(each)).close()


def require_loopback(address: str) -> None:
    """Raise ConfigError if this machine is to reach itself there over loopback, and
    cannot: nothing that is started would find the others."""
    host = parse_address(on_this_machine(address))[0]
    if not is_loopback(host):
        return
    try:
        with listen(resolve(format_address(host, 0))) as server:
            socket.create_connection(server.getsockname()[:2], 5).close()
    except OSError as error:
        raise ConfigError(
            f"{host}: this machine cannot reach itself ({error.strerror}); bring its "
            f"loopback interface up, as with `ip link set lo up`"
        ) from error


def reserve(numeric: str) -> tuple[str, socket.socket]:
    """Return a numeric address to bind, for port 0 one whose port is free, and a socket
    that listens at the bulk port beside it. Raises ConfigError."""
    host, port = parse_address(numeric)
    for _ in range(1 if port else _TRIES):
        found = format_address(host, port or secrets.choice(PORTS))
        try:
            with listen(found):
                return found, listen(bulk_address(found))
        except ConfigError:
            if port:
                raise
    raise bind_error(numeric)


def listen(numeric: str) -> socket.socket:
    """Return a socket that listens at a numeric address. Raises ConfigError."""
    host, port = parse_address(numeric)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    dual = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            (host, port), family=family, backlog=1024, dualstack_ipv6=dual
        )
    except OSError as error:
        remedy = "give another address"
        if error.errno == errno.EADDRINUSE:
            remedy = (
                "another process listens there: stop it, or give another port "
                "(0 = any free one)"
            )
        elif error.errno == errno.EADDRNOTAVAIL:
            remedy = "it is no address of this machine: give one, or 0.0.0.0"
        # The number, since Python adds the address to the text.
        why = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(f"cannot bind {numeric}: {why}; {remedy}") from error


def bind_error(numeric: str) -> ConfigError:
    """Explain why a server has just failed to bind a numeric address."""
    try:
        listen(numeric).close()
    except ConfigError as error:
        return error
    return ConfigError(f"cannot bind {numeric}: unknown reason; give another address")
