"""Wait for the hosts of an island before `jax.distributed` does.

jax 0.10.2 aborts every process of a world that is not complete in time, and names no
host. So host 0 listens at the meeting place first, until each of the others has said
its number and is still there; then all begin together, within seconds.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import time
from collections.abc import Mapping

from diloco_jax.island.hosts.meeting import WorldAddress
from diloco_jax.wire.addresses import is_loopback, parse_address

HERE = struct.Struct("!8sI")
"""A greeting, and the host's number."""
GREETING, GO = b"diloco-h", b"go"
ANSWER_S = 5.0
AGAIN_S = 1.0
"""Pause before host 0 is tried again, and between two looks at the time."""


def await_all(place: WorldAddress, count: int, patience_s: float) -> str:
    """Return, once all `count` hosts are here, the address at which this host met them.
    Raise TimeoutError with the names of the missing ones if that takes longer; OSError
    if host 0 cannot listen there."""
    host, port = parse_address(place.address, "the meeting place of the hosts")
    deadline = time.monotonic() + patience_s
    if place.index:
        missing, here = _come(host, port, place.index, deadline)
    else:
        missing, here = _wait(port, count, deadline)
    if missing:
        raise TimeoutError(
            f"{missing} at {place.address} within {patience_s:g} s; look into the log "
            f"of the host that is missing, or raise placement.hosts_budget_s"
        )
    return here


def _wait(port: int, count: int, deadline: float) -> tuple[str, str]:
    """Listen as host 0; return which hosts did not come, or nothing, and the address at
    which they reached it."""
    came: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as opened:
        server = opened.enter_context(_listen(port))
        looks = opened.enter_context(selectors.DefaultSelector())
        looks.register(server, selectors.EVENT_READ)
        while len(came) < count - 1:
            if time.monotonic() >= deadline:
                absent = [str(n) for n in range(1, count) if n not in came]
                return f"hosts {', '.join(absent)} of this island did not come", ""
            for key, _ in looks.select(AGAIN_S):
                if key.fileobj is not server:
                    # It says nothing more: it is gone, and comes again.
                    looks.unregister(key.fileobj)
                    del came[key.data]
                    continue
                peer = opened.enter_context(server.accept()[0])
                index = _number(peer)
                if index is None or not 0 < index < count:
                    peer.close()
                    continue
                if index in came:
                    looks.unregister(came.pop(index))
                came[index] = peer
                looks.register(peer, selectors.EVENT_READ, index)
        _release(came)
        return "", _address_here(*came.values())


def _address_here(*peers: socket.socket) -> str:
    """Return this end's address, of several one that other machines reach."""
    found = [str(peer.getsockname()[0]).removeprefix("::ffff:") for peer in peers]
    return min(found, key=is_loopback)


def _listen(port: int) -> socket.socket:
    """Listen on every address, as jax will."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _number(peer: socket.socket) -> int | None:
    """Return the number that a host says; None for anything else that connects."""
    peer.settimeout(ANSWER_S)
    try:
        greeting, index = HERE.unpack(peer.recv(HERE.size, socket.MSG_WAITALL))
    except (OSError, struct.error):
        return None
    return int(index) if greeting == GREETING else None


def _release(came: Mapping[int, socket.socket]) -> None:
    for peer in came.values():
        with contextlib.suppress(OSError):
            peer.sendall(GO)
    for peer in came.values():
        with contextlib.suppress(OSError):
            # The end that closes first keeps the port for a while, and host 0 needs it.
            peer.recv(1)


def _come(host: str, port: int, index: int, deadline: float) -> tuple[str, str]:
    """Say this host's number to host 0 until it says go; return why it did not, and the
    address from which it was reached."""
    why = "no answer"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), min(left_s, ANSWER_S)) as peer:
                peer.sendall(HERE.pack(GREETING, index))
                peer.settimeout(left_s)
                if peer.recv(len(GO), socket.MSG_WAITALL) == GO:
                    return "", _address_here(peer)
        except OSError as error:
            why = str(error)
        time.sleep(min(AGAIN_S, max(0.0, deadline - time.monotonic())))
    return f"host 0 of this island did not let host {index} in ({why})", ""
