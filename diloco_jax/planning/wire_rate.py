"""Costs of fragments on the wire: the product's client and server, in two processes.

`python -m diloco_jax.planning.wire_rate CERTIFICATES BYTES` serves payloads of that
size on loopback, with mutual TLS, until standard input ends. The handlers only give a
place and take the bytes.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from diloco_jax.deadlines import Deadlines
from diloco_jax.protocol import messages
from diloco_jax.protocol.values import Version
from diloco_jax.wire import bulk
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import Busy
from diloco_jax.wire.fetch_source import FetchSource
from diloco_jax.wire.principal import COORDINATOR, island
from diloco_jax.wire.profiling import NoProfiles
from diloco_jax.wire.server import Server
from diloco_jax.wire.session import Session
from diloco_jax.wire.tls import TlsFiles

DEADLINES = Deadlines(30.0)
BULK_CHANNELS = 4
STATUS_S = 10.0
"""Seconds that the server has to say how much of its core it has used."""
STOP_S = 30.0
VERSION = Version(1, 1)
ISLAND = "a"
ME: dict[str, Any] = {
    "run_id": "measuring",
    "island": ISLAND,
    "incarnation": 1,
    "session": "s",
}
BULK_ALONE = "this coordinator measures transfers; it takes no islands"


def core_seconds(size: int, repetitions: int) -> tuple[float, float]:
    """Return the coordinator's core seconds per GB, of uploads and of fetches with
    mutual TLS: the median of several."""
    payload = bytes(size)
    with tempfile.TemporaryDirectory(prefix="diloco-wire-") as folder:
        make_certificates(folder, [], 1, islands=[ISLAND])
        command = [sys.executable, "-P", "-m", __name__, folder, str(size)]
        with served(command) as (address,):
            client = client_of(address, TlsFiles.load(folder, island(ISLAND)))
            medians: list[float] = []
            ways: list[Callable[[], object]] = [
                lambda: client.transfers.upload(upload_of(size), payload),
                lambda: client.transfers.fetch(fetch_request(), max_bytes=size),
            ]
            for way in ways:
                way()  # The first time connects, and touches the pages.
                used = []
                for _ in range(repetitions):
                    began = client.status(STATUS_S)["coordinator"]
                    way()
                    used.append(client.status(STATUS_S)["coordinator"] - began)
                medians.append(statistics.median(used) / size * 1e9)
            client.close()
    up, down = medians
    return up, down


def client_of(address: str, tls: TlsFiles | None) -> Client:
    """Return an island's client."""
    return Client(address, tls=tls, deadlines=DEADLINES, bulk_channels=BULK_CHANNELS)


def upload_of(size: int) -> bulk.UploadStart:
    """Return the start of an upload of one payload."""
    return bulk.UploadStart(fragment=0, tick=1, offset=0, length=size, total=size, **ME)


def fetch_request() -> bulk.FetchRequest:
    """Return the request of one payload."""
    return bulk.FetchRequest(fragment=0, want=VERSION, have=None, **ME)


@contextlib.contextmanager
def served(command: Sequence[str]) -> Iterator[list[str]]:
    """Start a server's process; yield the words that it prints first, its addresses.
    Afterwards end its standard input, and wait for it."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()
        finally:
            try:
                process.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def serve(certificates: Path, size: int, *, tls: bool) -> tuple[Server, str]:
    """Start a server of payloads; return it and its address."""
    files = TlsFiles.load(certificates, COORDINATOR) if tls else None
    server = Server(
        "127.0.0.1:0",
        _Places(size),
        tls=files,
        deadlines=DEADLINES,
        max_islands=1,
        max_hosts=1,
        bulk_channels=BULK_CHANNELS,
    )
    return server, server.start()


class _Places(NoProfiles):
    """Handlers with one buffer, for uploads and for fetches."""

    def __init__(self, size: int) -> None:
        self._buffer = bytearray(size)

    def connect(self, hello: messages.Hello, session: Session) -> None:
        raise Busy(BULK_ALONE)

    def receive(self, session: Session, message: Any) -> None:
        raise Busy(BULK_ALONE)

    def disconnect(self, session: Session) -> None:
        pass

    def upload_begin(self, start: bulk.UploadStart) -> memoryview:
        return memoryview(self._buffer)[start.offset : start.offset + start.length]

    def upload_end(self, start: bulk.UploadStart, place: memoryview) -> bool:
        return start.offset + start.length == start.total

    def keep(self, cycle: int) -> dict[str, Any]:
        raise Busy(BULK_ALONE)

    def steer(self, order: messages.Steer) -> dict[str, Any]:
        raise Busy(BULK_ALONE)

    def kept(self, cycle: int, name: str) -> memoryview:
        raise Busy(BULK_ALONE)

    def fetch(self, request: bulk.FetchRequest) -> FetchSource:
        return FetchSource(
            version=VERSION,
            full=True,
            count=0,
            buffers=[self._buffer],
            total=len(self._buffer),
        )

    def status(self) -> dict[str, Any]:
        return {"coordinator": time.process_time()}


def main(arguments: list[str]) -> None:
    """Serve as the module's docstring says."""
    certificates, size = arguments
    server, address = serve(Path(certificates), int(size), tls=True)
    print(address, flush=True)
    sys.stdin.read()
    server.stop(1.0)


if __name__ == "__main__":
    main(sys.argv[1:])
