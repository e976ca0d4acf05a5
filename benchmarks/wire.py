"""The speed of fragments on the wire, against the limit of plain sockets.

Question: what share of a bare TCP connection's speed do uploads and fetches have, with
and without mutual TLS, and what do they cost in CPU? Client and server are the
product's own, in two processes on loopback, with 4 bulk channels and checksums; the
handlers only give a place and take the bytes. One payload goes through a bare socket,
an upload and a fetch in turn, so that what else the machine does meets all alike.

Prediction: 0.35 of the bare socket without TLS, 0.3 with it (gRPC alone was measured
at 0.45 and 0.4); 1.2 CPU seconds per GB, 1.5 with TLS.

What it means: at 5 Gbit/s (0.625 GB/s) the link limits, not the wire, as long as the
speed is above that.

Seen: 0.40 to 0.46 of the bare socket, 0.32 to 0.38 with TLS: both ends share two cores
here, and take 2.2 (upload) and 2.6 core seconds per GB, 2.9 and 3.2 with TLS, which
limits them to 4.4 to 5.8 Gbit/s. A profile of a fetch (perf, the island's end) has a
third in page faults and copies of the kernel, a fifth in copies of ours and of gRPC, an
eighth in switching threads, a twentieth in XXH3. A client and a server of gRPC that do
nothing else take 1.3 to 1.7. Tried in turn, 64 MiB forty times each: keeping freed
memory (`commands.ALLOCATOR`), so that messages of 1 MiB are not faulted in again each
time, 2.2 to 1.8 for uploads and 2.5 to 2.2 for fetches; chunks of 2 and 4 MiB are
slower; one bulk channel takes a quarter less.

Command: `python benchmarks/wire.py`. Cost: about a minute on two cores.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import support

from diloco_jax.cluster.commands import ALLOCATOR
from diloco_jax.planning import wire_rate
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.client import Client
from diloco_jax.wire.principal import island
from diloco_jax.wire.tls import TlsFiles

LINK_GBIT = 5.0
"""Bytes per second of an ordinary link between sites."""
RECEIVE_BYTES = 1 << 20


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    parser.add_argument("--mib", type=int, default=64, help="size of the payload")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--serve", metavar="CERTIFICATES")
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args()
    if not ALLOCATOR.items() <= os.environ.items():
        # As the product's processes have it; the allocator reads it when it starts.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ALLOCATOR)
    size = options.mib << 20
    if options.serve:
        serve(Path(options.serve), size, tls=options.tls)
        return 0
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="diloco-") as folder:
        make_certificates(Path(folder), [], 1, islands=[wire_rate.ISLAND])
        for tls in (False, True):
            raw["tls" if tls else "plain"] = measure(
                Path(folder), size, options.repeats, tls=tls
            )
    rows, checks = [], []
    for kind, samples in raw.items():
        for way in ("bare", "upload", "fetch"):
            rows.append(_row(kind, way, samples, size))
        for way in ("upload", "fetch"):
            gbit = 8e-9 * size / statistics.median(s["seconds"] for s in samples[way])
            what = f"{way}, {kind}: Gbit/s, median"
            checks.append(support.at_least(what, gbit, LINK_GBIT, ".1f"))
    raw = {"payload_bytes": size, "samples": raw}
    return support.write_results(
        options.out, "wire", __doc__, {"Speeds": rows}, checks, raw
    )


def _row(
    kind: str, way: str, samples: dict[str, list[dict[str, float]]], size: int
) -> dict[str, str]:
    speeds = sorted(size / s["seconds"] / 1e9 for s in samples[way])
    shares = sorted(
        bare["seconds"] / s["seconds"]
        for bare, s in zip(samples["bare"], samples[way], strict=True)
    )
    cpu = {
        end: statistics.median(s[end] for s in samples[way]) / size * 1e9
        for end in ("island", "coordinator")
    }
    name = {"bare": "bare socket, one connection, no TLS"}.get(way, f"{way}, {kind}")
    return {
        "what": name,
        "GB/s": _spread(speeds),
        "of the bare socket": _spread(shares),
        "CPU s per GB, island": f"{cpu['island']:.2f}",
        "CPU s per GB, coordinator": f"{cpu['coordinator']:.2f}",
    }


def _spread(values: list[float]) -> str:
    """Median and range of sorted values."""
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def measure(
    certificates: Path, size: int, repeats: int, *, tls: bool
) -> dict[str, list[dict[str, float]]]:
    """Measure seconds, and CPU seconds of both ends, by way, `repeats` times."""
    samples: dict[str, list[dict[str, float]]] = {}
    payload = bytes(size)
    with _server(certificates, size, tls=tls) as (address, bare_port):
        files = TlsFiles.load(certificates, island(wire_rate.ISLAND)) if tls else None
        client = wire_rate.client_of(address, files)
        ways: dict[str, Callable[[], object]] = {
            "bare": lambda: _send_bare(bare_port, payload),
            "upload": lambda: client.transfers.upload(
                wire_rate.upload_of(size), payload
            ),
            "fetch": lambda: client.transfers.fetch(
                wire_rate.fetch_request(), max_bytes=size
            ),
        }
        for repeat in range(repeats + 1):
            for way, go in ways.items():
                before, began = _cpu(client), time.perf_counter()
                go()
                used = {"seconds": time.perf_counter() - began}
                used |= {end: cpu - before[end] for end, cpu in _cpu(client).items()}
                if repeat:  # The first time connects, and touches the pages.
                    samples.setdefault(way, []).append(used)
        client.close()
    return samples


def _cpu(client: Client) -> dict[str, float]:
    """CPU seconds so far of either end."""
    return {"island": time.process_time(), **client.status(wire_rate.STATUS_S)}


def _send_bare(port: int, payload: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30.0) as connection:
        connection.sendall(payload)
        connection.shutdown(socket.SHUT_WR)
        if connection.recv(1) != b"!":
            raise RuntimeError("the bare socket's other end did not answer")


# ---- the other process -----------------------------------------------------------


@contextlib.contextmanager
def _server(certificates: Path, size: int, *, tls: bool) -> Iterator[tuple[str, int]]:
    """Start the server; yield its gRPC address and the port of its bare socket."""
    command = [sys.executable, __file__, "--serve", str(certificates)]
    command += ["--mib", str(size >> 20), *(["--tls"] if tls else [])]
    with wire_rate.served(command) as (address, port):
        yield address, int(port)


def serve(certificates: Path, size: int, *, tls: bool) -> None:
    """Print the addresses; serve bare connections until standard input ends."""
    server, address = wire_rate.serve(certificates, size, tls=tls)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(0.2)
    print(address, listener.getsockname()[1], flush=True)
    place = memoryview(bytearray(size))
    while not select.select([sys.stdin], [], [], 0)[0]:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            with connection:
                filled = 0
                while got := connection.recv_into(
                    place[filled : filled + RECEIVE_BYTES]
                ):
                    filled += got
                connection.sendall(b"!")
    server.stop(1.0)


if __name__ == "__main__":
    sys.exit(main())
