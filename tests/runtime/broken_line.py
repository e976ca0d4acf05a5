"""A line between islands and their coordinator that can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Line:
    """Forwards what comes to `address` on this machine, until it is cut."""

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to, self._whole = (host, int(port)), True
        self._ends: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.cut()
        self._listener.close()

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

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                with self._lock:
                    whole = self._whole
                if not whole:
                    near.close()
                    continue
                far = socket.create_connection(self._to)
                with self._lock:
                    self._ends |= {near, far}
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=ends, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while octets := source.recv(1 << 16):
            sink.sendall(octets)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
