"""A line between islands and their coordinator that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

from diloco_jax.wire import addresses


class Line:
    """Forwards what comes to `address` on this machine, and to the bulk port beside it,
    until it is cut."""

    def __init__(self, to: str) -> None:
        self._whole = True
        self._ends: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.address, bulk = addresses.reserve("127.0.0.1:0")
        self._listeners = [addresses.listen(self.address), bulk]
        for listener, far in zip(
            self._listeners, (to, addresses.bulk_address(to)), strict=True
        ):
            forwarding = (listener, addresses.parse_address(far))
            threading.Thread(target=self._accept, args=forwarding, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cut()
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)  # So that nobody waits in it.
            listener.close()

    def cut(self) -> None:
        """End all connections; new ones end at once."""
        with self._lock:
            self._whole = False
            ends, self._ends = self._ends, set()
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def mend(self) -> None:
        with self._lock:
            self._whole = True

    def _accept(self, listener: socket.socket, to: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                try:
                    far = socket.create_connection(to)
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    if whole := self._whole:
                        self._ends |= {near, far}
                if not whole:
                    near.close()
                    far.close()
                    continue
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=ends, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while octets := source.recv(1 << 16):
            sink.sendall(octets)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
