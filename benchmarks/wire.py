"""The speed of fragments on the wire, against the limit of plain sockets.

Question: what share of raw TLS do uploads and fetches have, on loopback and through a
slow relay, and what do they cost in CPU? Client and server are the product's own, in
two processes on loopback, with 4 bulk connections and checksums; the handlers only give
a place and take the bytes. Raw TLS is one connection of the ssl module (`sendall` and
`recv_into` of views, TLS 1.3, both certificates), without checksums. One payload goes
over a bare socket, over raw TLS, as an upload and as a fetch in turn, so that what else
the machine does meets all alike. The relay is a third process that passes bytes on at
RELAY_BYTES_PER_S for each direction, all connections together, after RELAY_DELAY_S.

Prediction: OpenSSL takes 0.35 core seconds per GB to send and 0.65 to receive, XXH3
0.05, and frames next to nothing: 0.4 and 0.7, and 0.8 of raw TLS on loopback.

What it means: at 5 Gbit/s (0.625 GB/s) the link limits, not the wire, as long as both
ends take less than 1.6 core seconds per GB.

Seen in an earlier run, 2026-11-25 13:12 UTC on two cores of an AMD EPYC, whose figures
are not those of the tables below (14 to 16 processes of other work wanted these cores:
trust ratios and core seconds): 0.41 core seconds per GB to send an upload and 0.73 to
receive it, 0.44 and 0.73 for a fetch, where raw TLS took 0.40 and 0.73. So XXH3, frames
and threads took at most 0.05, the kernel 0.15 (the bare socket), and OpenSSL
(AES-256-GCM) the rest. Four connections get more of a loaded machine than the one of
raw TLS does: shares above 1 say no more than that nothing is lost. Blocks of 256 KiB to
4 MiB cost the same, and so do 1, 2 and 4 connections. New pages for every fetched
payload took 0.3 with one connection and 0.7 with four, of the kernel's time alone; so
the memory of the last payload is used again (`wire/transfers.py`). Through the relay
both ends wait for small pieces: raw TLS took 1.07 to receive there, an upload 1.27.

Alternatives: over gRPC, as it was until then, the same transfers took 1.3 to 1.9 core
seconds per GB at the island and 1.3 to 1.6 at the coordinator. Arrow Flight was
measured before the first line was written: 1.85 for both ends, without our checksums,
where raw TLS took 1.09, at two fifths of the speed of raw TLS; it is a large dependency
besides. HTTP/2 in a library was not measured: it adds windows and frames of 16 KiB to
those of TLS and TCP. TLS by the kernel is not in this one. The standard library's ssl
is kept current with Python; what is ours is frames, an acceptor and a list of
connections.

Command: `python benchmarks/wire.py`. Cost: about a minute on two cores.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import select
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import support

from diloco_jax.cluster.cluster import ALLOCATOR
from diloco_jax.config.placement import Deadlines
from diloco_jax.protocol.messages import Version
from diloco_jax.wire import addresses
from diloco_jax.wire.bulk import FetchRequest, FetchSource, UploadStart
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.client import Client
from diloco_jax.wire.peers import COORDINATOR, island
from diloco_jax.wire.server import Server
from diloco_jax.wire.session import Handlers
from diloco_jax.wire.tls import TlsFiles

CORE_SECONDS_PER_GB = 0.85
"""Most that either end may take, with TLS."""
OF_RAW_TLS = 0.70
OF_RAW_TLS_RELAYED = 0.90
RECEIVE_BYTES = 1 << 20
RELAY_BYTES_PER_S = 40e6
RELAY_DELAY_S = 0.02
RELAY_MIB = 16
RELAY_REPEATS = 3
PIECE_BYTES = 64 << 10
IN_FLIGHT = 32
"""Pieces of one connection that the relay holds at most."""
WAIT_S = 60.0
STATUS_S = 10.0
"""Seconds that the server has to say how much of its core it has used."""
STOP_S = 30.0
BULK_CHANNELS, DEADLINES = 4, Deadlines(30.0)
VERSION, ISLAND = Version(1, 1), "a"
ME: dict[str, Any] = {
    **{"run_id": "measuring", "island": ISLAND, "incarnation": 1},
    **{"session": "s", "fragment": 0},
}
Ways = dict[str, Callable[[], Any]]
Samples = dict[str, list[dict[str, float]]]


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.quick_parser(__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of the payload")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--serve", metavar="CERTIFICATES")
    parser.add_argument("--relay", nargs=2, type=int, metavar="PORT")
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    if not ALLOCATOR.items() <= os.environ.items():
        # As the product's processes have it; the allocator reads it when it starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    size = options.mib << 20
    if options.relay:
        relay(*options.relay)
        return 0
    if options.serve:
        serve(Path(options.serve), size, tls=options.tls)
        return 0
    repeats = 5 if options.quick else options.repeats
    raw: dict[str, Samples] = {}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        make_certificates(Path(folder), [], 1, islands=[ISLAND])
        for tls in (False, True):
            kind = "tls" if tls else "plain"
            raw[kind] = measure(Path(folder), size, repeats, tls=tls)
        relayed = 1 if options.quick else RELAY_REPEATS
        raw["relayed"] = measure(
            Path(folder), RELAY_MIB << 20, relayed, tls=True, slowly=True
        )
    sizes = {"plain": size, "tls": size, "relayed": RELAY_MIB << 20}
    rows = [
        _row(kind, way, samples, sizes[kind])
        for kind, samples in raw.items()
        for way in samples
    ]
    checks = []
    for way in ("upload", "fetch"):
        for end in ("island", "coordinator"):
            used = _core_seconds(raw["tls"][way], end, size)
            what = f"{way}, tls: core s per GB, {end}, median"
            checks.append(support.at_most(what, used, CORE_SECONDS_PER_GB, ".2f"))
        for kind, least in (("tls", OF_RAW_TLS), ("relayed", OF_RAW_TLS_RELAYED)):
            share = statistics.median(_shares(raw[kind], "raw TLS", way))
            what = f"{way}, {kind}: share of raw TLS, median"
            checks.append(support.at_least(what, share, least, ".2f"))
    data = {"payload_bytes": sizes, "load_at_start": load, "samples": raw}
    return support.deliver(options, "wire", __doc__, {"Speeds": rows}, checks, data)


def _row(kind: str, way: str, samples: Samples, size: int) -> dict[str, str]:
    speeds = [size / s["seconds"] / 1e9 for s in samples[way]]
    limit = "raw TLS" if "raw TLS" in samples else "bare"
    of_limit = support.spread(_shares(samples, limit, way), ".2f")
    return {
        "what": "bare socket" if way == "bare" else f"{way}, {kind}",
        "GB/s": support.spread(speeds, ".2f"),
        "of the limit": f"{of_limit} of {limit}",
        "core s per GB, island": f"{_core_seconds(samples[way], 'island', size):.2f}",
        "core s per GB, coordinator": (
            f"{_core_seconds(samples[way], 'coordinator', size):.2f}"
        ),
        "page faults per MiB, island": (
            f"{statistics.median(s['faults'] for s in samples[way]) / size * 2**20:.1f}"
        ),
    }


def _shares(samples: Samples, limit: str, way: str) -> list[float]:
    pairs = zip(samples[limit], samples[way], strict=True)
    return [most["seconds"] / s["seconds"] for most, s in pairs]


def _core_seconds(samples: list[dict[str, float]], end: str, size: int) -> float:
    return statistics.median(s[end] for s in samples) / size * 1e9


def measure(
    certificates: Path, size: int, repeats: int, *, tls: bool, slowly: bool = False
) -> Samples:
    """Measure seconds, and CPU seconds of both ends, by way, `repeats` times. slowly:
    through the relay, without the bare socket."""
    samples: Samples = {}
    payload = bytes(size)
    with contextlib.ExitStack() as stack:
        address, port = stack.enter_context(_server(certificates, size, tls=tls))
        files = TlsFiles.load(certificates, island(ISLAND)) if tls else None
        direct = _client_of(address, files)
        stack.callback(direct.close)
        client = direct
        if slowly:
            address, port = stack.enter_context(_relayed(address, port))
            client = _client_of(address, files)
            stack.callback(client.close)
        context = files.client_context() if files is not None else None
        ways: Ways = {} if slowly else {"bare": lambda: _send(port, payload, None)}
        if context is not None:
            ways["raw TLS"] = lambda: _send(port, payload, context)
        ways["upload"] = lambda: client.transfers.upload(
            UploadStart(**ME, tick=1, offset=0, length=size, total=size), payload
        )
        ways["fetch"] = lambda: client.transfers.fetch(
            FetchRequest(**ME, want=VERSION, have=None), max_bytes=size
        )
        for repeat in range(repeats + 1):
            for way, go in ways.items():
                before = _used(direct)
                began = time.perf_counter()
                done = go()
                seconds = time.perf_counter() - began
                if way in ("bare", "raw TLS"):
                    seconds = done  # Without connecting and shaking hands.
                used = {end: cpu - before[end] for end, cpu in _used(direct).items()}
                if repeat:  # The first time connects, and touches the pages.
                    samples.setdefault(way, []).append({"seconds": seconds, **used})
    return samples


def _used(client: Client) -> dict[str, float]:
    """CPU seconds so far of either end, and page faults of this one."""
    faults = float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    ends = client.status(STATUS_S)
    return {"island": time.process_time(), "faults": faults, **ends}


def _send(port: int, payload: bytes, context: ssl.SSLContext | None) -> float:
    """Send the payload over one connection of its own; return seconds."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    connection.sendall(b"T" if context else b"P")
    if context is not None:
        connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
    with connection:
        connection.settimeout(None)
        if connection.recv(1) != b"?":
            raise RuntimeError("the raw connection's other end is not ready")
        began = time.perf_counter()
        view = memoryview(payload)
        for low in range(0, len(view), RECEIVE_BYTES):
            connection.sendall(view[low : low + RECEIVE_BYTES])
        if connection.recv(1) != b"!":
            raise RuntimeError("the raw connection's other end did not answer")
        return time.perf_counter() - began


def _client_of(address: str, tls: TlsFiles | None) -> Client:
    """Return an island's client."""
    return Client(address, tls=tls, deadlines=DEADLINES, bulk_channels=BULK_CHANNELS)


# ---- the other process -----------------------------------------------------------


@contextlib.contextmanager
def _served(command: Sequence[str]) -> Iterator[list[str]]:
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


def _serve(certificates: Path, size: int, *, tls: bool) -> tuple[Server, str]:
    """Start a server of payloads; return it and its address."""
    files = TlsFiles.load(certificates, COORDINATOR) if tls else None
    server = Server(
        "127.0.0.1:0",
        _OneBuffer(size),
        tls=files,
        deadlines=DEADLINES,
        max_islands=1,
        max_hosts=1,
        bulk_channels=BULK_CHANNELS,
    )
    return server, server.start()


class _OneBuffer(Handlers):
    """Handlers with one buffer, for uploads and for fetches; all else is refused."""

    def __init__(self, size: int) -> None:
        self._buffer = bytearray(size)

    def upload_begin(self, start: UploadStart) -> memoryview:
        return memoryview(self._buffer)[start.offset : start.offset + start.length]

    def upload_end(self, start: UploadStart, place: memoryview) -> bool:
        return start.offset + start.length == start.total

    def fetch(self, request: FetchRequest) -> FetchSource:
        return FetchSource(version=VERSION, count=0, buffers=[self._buffer])

    def status(self) -> dict[str, Any]:
        return {"coordinator": time.process_time()}


@contextlib.contextmanager
def _server(certificates: Path, size: int, *, tls: bool) -> Iterator[tuple[str, int]]:
    """Start the server; yield its gRPC address and the port of its bare socket."""
    command = [sys.executable, __file__, "--serve", str(certificates)]
    command += ["--mib", str(size >> 20), *(["--tls"] if tls else [])]
    with _served(command) as (address, port):
        yield address, int(port)


@contextlib.contextmanager
def _relayed(address: str, port: int) -> Iterator[tuple[str, int]]:
    """Start the relay; yield its addresses in the place of those."""
    control = addresses.parse_address(address)[1]
    command = [sys.executable, __file__, "--relay", str(control), str(port)]
    with _served(command) as (there, other):
        yield there, int(other)


def serve(certificates: Path, size: int, *, tls: bool) -> None:
    """Print the addresses; serve raw connections until standard input ends."""
    server, address = _serve(certificates, size, tls=tls)
    files = TlsFiles.load(certificates, COORDINATOR)
    context = files.server_contexts()()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    print(address, listener.getsockname()[1], flush=True)
    place = memoryview(bytearray(size))
    while not select.select([sys.stdin], [], [], 0)[0]:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(WAIT_S)
            if connection.recv(1) == b"T":
                connection = context.wrap_socket(connection, server_side=True)
            with connection:
                connection.settimeout(None)
                connection.sendall(b"?")
                filled = 0
                while filled < size:
                    room = place[filled : filled + RECEIVE_BYTES]
                    filled += connection.recv_into(room)
                connection.sendall(b"!")
                connection.recv(1)
    server.stop(1.0)


def relay(control: int, raw: int) -> None:
    """Pass on, slowly, what comes for control and bulk, and for raw connections, until
    standard input ends."""
    near, bulk = addresses.reserve("127.0.0.1:0")
    other = addresses.listen("127.0.0.1:0")
    rates = (_Rate(), _Rate())
    for listener, port in (
        (addresses.listen(near), control),
        (bulk, control + 1),
        (other, raw),
    ):
        threading.Thread(
            target=_accept, args=(listener, port, rates), daemon=True
        ).start()
    print(near, other.getsockname()[1], flush=True)
    sys.stdin.read()


class _Rate:
    """When bytes that come now have passed a link, which takes them one by one."""

    def __init__(self) -> None:
        self._lock, self._free = threading.Lock(), 0.0

    def passed(self, size: int) -> float:
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / RELAY_BYTES_PER_S
            return self._free


def _accept(listener: socket.socket, port: int, rates: tuple[_Rate, _Rate]) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port), WAIT_S)
        for one in (near, far):
            one.settimeout(None)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink, rate in ((near, far, rates[0]), (far, near, rates[1])):
            line: queue.Queue[tuple[float, bytes]] = queue.Queue(IN_FLIGHT)
            for work in (
                lambda s=source, q=line, r=rate: _read(s, q, r),
                lambda s=sink, q=line: _write(s, q),
            ):
                threading.Thread(target=work, daemon=True).start()


def _read(
    source: socket.socket, line: queue.Queue[tuple[float, bytes]], rate: _Rate
) -> None:
    octets = b"?"
    while octets:
        with contextlib.suppress(OSError):
            octets = source.recv(PIECE_BYTES)
            line.put((rate.passed(len(octets)) + RELAY_DELAY_S, octets))
            continue
        octets = b""
        line.put((0.0, octets))


def _write(sink: socket.socket, line: queue.Queue[tuple[float, bytes]]) -> None:
    while True:
        due, octets = line.get()
        time.sleep(max(0.0, due - time.monotonic()))
        with contextlib.suppress(OSError):
            if not octets:
                sink.shutdown(socket.SHUT_WR)
            sink.sendall(octets)
        if not octets:
            return


if __name__ == "__main__":
    support.script(main)
