"""Pass messages between a lead and the worker of an outpost, as they are."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from diloco_jax.coordinator.workers.line import (
    START_S,
    pass_frame,
    read_frame,
    write_frame,
)
from diloco_jax.deadlines import Deadlines
from diloco_jax.protocol.holding import WorkerFailed, from_worker
from diloco_jax.wire.duplex import End

ENDED = "its process there ended; see the log of `diloco worker` there"
HUNG = "its process there said nothing any more, and is killed"


def relay(
    lead: End, worker: End, deadlines: Deadlines, gone: Callable[[bool], None]
) -> None:
    """Pass messages on in both directions until an end is closed or silent.

    gone: called, before the lead hears that the worker is gone, if it has said that it
    failed; or, with True, if it says nothing any more, though it has the line.

    A worker shows that it lives far more often than `silence_s`, once it has started,
    and the lead waits longer for it. What the worker says is passed on to its end: its
    last word may be why it failed. A lead that still has its line then hears that the
    worker is gone: a line that breaks without that word is the network's.
    """
    silence_s = 2 * deadlines.lease_s
    lead.settimeout(3 * deadlines.lease_s)
    worker.settimeout(max(silence_s, START_S))
    heard, failed, left = time.monotonic(), False, threading.Event()
    """When the worker last said something, whether it has said that it failed, and
    whether the lead's end broke."""

    def hear(frame: bytes) -> None:
        nonlocal heard, failed
        heard, failed = time.monotonic(), failed or _is_failure(frame)
        worker.settimeout(silence_s)

    def inwards() -> None:
        if _pass_on(lead, worker, lambda _: None):
            left.set()
        cut(worker)

    thread = threading.Thread(target=inwards, daemon=True)
    thread.start()
    said_all = _pass_on(worker, lead, hear)
    silent = said_all and not left.is_set()
    if silent:
        hung = time.monotonic() - heard >= silence_s
        if hung or failed:
            gone(hung)
        with contextlib.suppress(OSError):
            write_frame(lead, WorkerFailed(text=HUNG if hung else ENDED))
    cut(lead)
    thread.join()


def _is_failure(frame: bytes) -> bool:
    """Tell whether this is the word of a worker that ends."""
    try:
        return isinstance(from_worker(frame), WorkerFailed)
    except msgspec.DecodeError:  # It is of another version.
        return False


def cut(end: End) -> None:
    """End what other threads send and receive."""
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


def _pass_on(here: End, there: End, seen: Callable[[bytes], None]) -> bool:
    """Pass messages on until either end is closed or silent; tell whether it is the
    first one."""
    while (frame := read_frame(here)) is not None:
        seen(frame)
        try:
            pass_frame(there, frame)
        except OSError:
            return False
    return True
