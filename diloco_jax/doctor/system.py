"""Check what the operating system gives a run: ports, clock, disk, memory, sockets."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from diloco_jax import machine
from diloco_jax.doctor.finding import Finding, note, ok, problem
from diloco_jax.doctor.surroundings import existing
from diloco_jax.errors import ConfigError
from diloco_jax.wire import addresses

GIB = 1 << 30
TRIAL_BYTES = 64 << 20
"""Bytes that the trial of the disk writes."""
SLOW_DISK = 100e6
"""Bytes per second below which a coordinator of 1 B parameters falls behind: it writes
each merge, and all of its state in turns."""
FREE_BYTES = 5 * GIB
FEWEST_FILES = 4096
"""Open files of a coordinator with some hundred hosts."""
SOCKET_BYTES = 16 << 20
"""Buffer of one stream at 5 Gbit/s and 25 ms."""
CLOCK_UNSYNCHRONISED = 5
"""Returned by adjtimex where nothing disciplines the clock."""


def check_system(folder: Path) -> Iterator[Finding]:
    """Yield findings on this machine. folder: where runs are to be; it is tried."""
    yield ok("processor", f"{machine.cores()} cores for this process")
    yield _memory()
    yield _disk(folder)
    yield _ports()
    yield _open_files()
    yield _clock()
    if sys.platform == "linux":
        yield _sockets()


def _memory() -> Finding:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ok("memory", f"{whole / GIB:.1f} GiB")


def _disk(folder: Path) -> Finding:
    """Write, and force to the disk, what one second of a good disk takes."""
    folder = existing(folder)
    free = shutil.disk_usage(folder).free
    try:
        rate = _written_per_s(folder, min(TRIAL_BYTES, free // 4))
    except OSError as error:
        return problem(
            "disk",
            f"{folder} cannot be written: {error.strerror}",
            "give a folder that can, as --folder here and as --workdir of runs",
        )
    found = f"{folder}: {rate / 1e6:,.0f} MB/s, {free / GIB:,.1f} GiB free"
    if free < FREE_BYTES:
        return note("disk", found, "free some space: diloco plan says what a run needs")
    if rate < SLOW_DISK:
        return note(
            "disk",
            found,
            "large runs want a faster disk: diloco plan says what a run writes",
        )
    return ok("disk", found)


def _written_per_s(folder: Path, nbytes: int) -> float:
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        started = time.monotonic()
        for _ in range(max(1, nbytes // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return file.tell() / max(time.monotonic() - started, 1e-6)


def _ports() -> Finding:
    """Open ports as a coordinator does, for control and bulk, and reach both."""
    try:
        control, bulk = addresses.reserve("127.0.0.1:0")
        with bulk, addresses.listen(control) as server:
            for port in (server, bulk):
                socket.create_connection(port.getsockname(), timeout=5).close()
        return ok("ports", f"{control} and the port of bulk beside it were reached")
    except (OSError, ConfigError) as error:
        return problem(
            "ports",
            f"two ports in a row of this machine cannot be opened and reached: {error}",
            "allow connections over the loopback interface: `ip link set lo up`",
        )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    found = f"{'no limit' if soft == unlimited else f'{soft:,}'} at once"
    if soft != unlimited and soft < FEWEST_FILES:
        most = FEWEST_FILES if hard == unlimited else min(hard, FEWEST_FILES)
        return note("open files", found, f"ulimit -n {most}, for a large coordinator")
    return ok("open files", found)


def _clock() -> Finding:
    """Tell if anything keeps the clock right: certificates and metrics go by it."""
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    state = _clock_state()
    if state is None:
        return ok("clock", f"{now}; the system does not tell if it is kept right")
    if state == CLOCK_UNSYNCHRONISED:
        return note(
            "clock",
            f"{now}, and the kernel says that nothing keeps it right",
            "have NTP or chrony run, here or on the host of this container",
        )
    return ok("clock", f"{now}, kept right by the system")


def _clock_state() -> int | None:
    """Return what adjtimex says of the clock; None where there is no such call."""
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except (AttributeError, OSError):
        return None
    # struct timex, all zeros: change nothing. It has 208 bytes on 64-bit Linux.
    state: int = adjtimex(ctypes.create_string_buffer(512))
    return None if state < 0 else state


def _sockets() -> Finding:
    """Compare the largest buffers of a stream with what long links need."""
    sizes = {name: _largest(name) for name in ("tcp_rmem", "tcp_wmem")}
    found = ", ".join(f"{name} up to {n / 2**20:.0f} MiB" for name, n in sizes.items())
    if any(0 < n < SOCKET_BYTES for n in sizes.values()):
        return note(
            "sockets",
            found,
            "on links between regions raise the last number of both to "
            f"{SOCKET_BYTES} (sysctl net.ipv4.tcp_wmem)",
        )
    return ok("sockets", found)


def _largest(name: str) -> int:
    try:
        text = Path(f"/proc/sys/net/ipv4/{name}").read_text()
    except OSError:
        return 0
    return int(text.split()[-1])
