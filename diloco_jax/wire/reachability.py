"""Explain why a coordinator cannot be reached, by asking its socket.

gRPC says "unavailable" for nearly everything. This is called after a failure, never
before.
"""

from __future__ import annotations

import socket
import ssl

from diloco_jax.wire.addresses import parse_address
from diloco_jax.wire.errors import ConnectionLost, SecurityError, WireError
from diloco_jax.wire.tls import TlsFiles


def explain(address: str, tls: TlsFiles | None, timeout_s: float) -> WireError | None:
    """Return the cause with its remedy, or None if connecting works as it should."""
    host, port = parse_address(address)
    try:
        connection = socket.create_connection((host, port), timeout_s)
    except socket.gaierror as error:
        return ConnectionLost(
            f"{address}: host name {host!r} is not known ({error.strerror}); check the "
            f"coordinator's address"
        )
    except ConnectionRefusedError:
        return ConnectionLost(
            f"{address}: nothing listens there; check that the coordinator runs and "
            f"that this is its address"
        )
    except OSError as error:
        return ConnectionLost(
            f"{address}: no connection within {timeout_s:g} s ({error}); check the "
            f"address, the network between and its firewalls"
        )
    with connection:
        if tls is None:
            return _without_tls(address, connection)
        return _with_tls(address, host, connection, tls)


def large_lost(address: str) -> str:
    """Return what is to be tried where a peer accepts connections and what it sends
    does not come."""
    return (
        f"its machine or the network between is overloaded, or large packets are lost "
        f"on the way (MTU, firewall): try `ping -M do -s 1472 "
        f"{parse_address(address)[0]}`, and lower the MTU of this machine if that fails"
    )


def _without_tls(address: str, connection: socket.socket) -> WireError | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(connection).close()
    except OSError:  # no TLS there, as expected
        return None
    return SecurityError(
        f"{address} speaks TLS and this process has no certificates; give the folder "
        f"made by `diloco certs`"
    )


def _with_tls(
    address: str, host: str, connection: socket.socket, tls: TlsFiles
) -> WireError | None:
    context = tls.client_context()
    context.set_alpn_protocols(["h2"])
    try:
        secured = context.wrap_socket(connection, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        return SecurityError(
            f"{address}: the coordinator's certificate does not fit "
            f"{tls.folder / 'ca.pem'} or this address: {error.verify_message}; use "
            f"certificates of the same authority, and add the address with "
            f"`diloco certs --add` if it is not named there"
        )
    except TimeoutError:
        # A slow peer may have certificates all the same.
        return ConnectionLost(
            f"{address}: no TLS handshake within {connection.gettimeout():g} s; check "
            f"that this is the coordinator's address; {large_lost(address)}"
        )
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionError) as error:
        # A server without TLS answers in its own way; a relay has nobody to ask.
        return ConnectionLost(
            f"{address}: the connection ended before an answer ({error}); check that "
            f"the coordinator runs, if a relay or load balancer listens there"
        )
    except OSError as error:
        return SecurityError(
            f"{address} does not answer with TLS ({error}) and this process has "
            f"certificates; give the coordinator its own too, or neither"
        )
    # In TLS 1.3 the server judges our certificate after our side of the handshake.
    verdict = "it closed the connection"
    with secured:
        try:
            if secured.recv(1):
                return None
        except TimeoutError:
            return None
        except OSError as error:
            verdict = str(error)
    return SecurityError(
        f"{address} does not accept {tls.certificate_path} ({verdict}); use "
        f"certificates of the coordinator's authority, and see the coordinator's log"
    )
