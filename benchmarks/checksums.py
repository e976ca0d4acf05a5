"""The cost of checksums: core seconds per GB, beside a copy of the same bytes.

Question: which checksums can a path of bulk bytes afford? Frames of the wire carry
xxh3_64 of their bytes, sealed files (snapshots, publishes) xxh3_128, records of the log
CRC-32, and own parameters xxh3_128 after each merge; keys, configs and chunks of data
are named by SHA-256, which also checks what a peer may lie about: anchors that islands
send in place of lost fragments. BLAKE2b is what `hashlib` has beside it. One buffer is
summed, and copied, in turn; seconds are those of the processor.

The wire may take 0.85 core seconds per GB at each end, TLS included. A checksum there
is to be a small part of that: less than a tenth.

Prediction: xxh3 at the speed of reading memory; CRC-32 several times as dear; SHA-256
and BLAKE2b as dear as the whole wire.

Command: `python -m benchmarks.checksums`. Cost: half a minute.
"""

from __future__ import annotations

import hashlib
import statistics
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import support
from xxhash import xxh3_64_intdigest, xxh3_128

SIZE, QUICK_SIZE, ROUNDS = 256 << 20, 32 << 20, 9
WIRE_CORE_S_PER_GB = 0.85
WIRE_SHARE_MAX = 0.1
OF_THE_WIRE, COPY = "xxh3_64", "a copy"
USED = {
    "xxh3_64": "each frame of the wire",
    "xxh3_128": "snapshots, publishes, merged parameters",
    "CRC-32": "records of the log",
    "SHA-256": "names of configs, keys, chunks of data; anchors of peers",
    "BLAKE2b": "order of peers",
    COPY: "",
}


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    options = support.quick_parser(__doc__).parse_args()
    size = QUICK_SIZE if options.quick else SIZE
    times = measured(size, ROUNDS)
    middle = {name: statistics.median(found) for name, found in times.items()}
    rows = [
        {
            "checksum": name,
            "used for": USED[name],
            "core s per GB": support.spread(found, ".3f"),
            "over a copy": f"{middle[name] / middle[COPY]:.2f}",
            "of the wire's 0.85": f"{middle[name] / WIRE_CORE_S_PER_GB:.0%}",
        }
        for name, found in times.items()
    ]
    share = middle[OF_THE_WIRE] / WIRE_CORE_S_PER_GB
    checks = [support.at_most("share of the wire's checksum", share, WIRE_SHARE_MAX)]
    return support.deliver(
        options,
        "checksums",
        __doc__,
        {f"{ROUNDS} rounds of {size >> 20} MiB": rows},
        checks,
        {"core_s_per_gb": times},
    )


def measured(size: int, rounds: int) -> dict[str, list[float]]:
    """Return core seconds per GB of each round."""
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    place, view = np.empty_like(data), data.data
    ways: dict[str, Callable[[], Any]] = {
        "xxh3_64": lambda: xxh3_64_intdigest(view),
        "xxh3_128": lambda: xxh3_128(view).digest(),
        "CRC-32": lambda: zlib.crc32(view),
        "SHA-256": lambda: hashlib.sha256(view).digest(),
        "BLAKE2b": lambda: hashlib.blake2b(view).digest(),
        COPY: lambda: np.copyto(place, data),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            began = time.process_time()
            work()
            if number:  # The first one touches the memory.
                taken = time.process_time() - began
                times[name].append(taken / (size / 1e9))
    return times


if __name__ == "__main__":
    support.script(main)
