"""Several gRPC calls that succeed or fail together, each with an idle deadline."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any, TypeVar

import grpc

from diloco_jax.wire import errors
from diloco_jax.wire.errors import ConnectionLost
from diloco_jax.wire.threads import Guard, IdleWatch

Result = TypeVar("Result")


class CallSlot:
    """A place for a call that may be cancelled before it exists."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: Any = None
        self._cancelled = False

    def fill(self, call: Any) -> Any:
        """Put the call in its place, and return it."""
        with self._lock:
            self._call = call
            cancelled = self._cancelled
        if cancelled:
            call.cancel()
        return call

    def cancel(self) -> None:
        """Cancel the call, now or when it is filled in; harmless if it is done."""
        with self._lock:
            self._cancelled = True
            call = self._call
        if call is not None:
            call.cancel()


class CallGroup:
    """The calls of one transfer."""

    def __init__(self, peer: str, watch: IdleWatch, idle_s: float) -> None:
        self._peer, self._watch, self._idle_s = peer, watch, idle_s
        self._lock = threading.Lock()
        self._slots: set[CallSlot] = set()
        self._cancelled = threading.Event()

    @contextlib.contextmanager
    def call(self) -> Iterator[tuple[CallSlot, Guard]]:
        """Make one call: fill the slot, touch the guard. gRPC's errors are raised as
        wire errors."""
        slot = CallSlot()
        with self._lock:
            self._slots.add(slot)
        if self._cancelled.is_set():
            slot.cancel()
        try:
            with self._watch.guard(self._idle_s, slot.cancel) as guard:
                yield slot, guard
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError) as error:
            if guard.expired:
                raise ConnectionLost(
                    f"{self._peer}: not a chunk moved for {self._idle_s:g} s"
                ) from error
            if self._cancelled.is_set() or not isinstance(error, grpc.RpcError):
                # A ValueError is how gRPC says that its channel is closed.
                raise ConnectionLost(
                    f"{self._peer}: the transfer was ended at this end ({error})"
                ) from error
            raise errors.from_rpc(error, self._peer) from error
        finally:
            slot.cancel()
            with self._lock:
                self._slots.discard(slot)

    def cancel(self) -> None:
        """Cancel all calls, including later ones."""
        self._cancelled.set()
        with self._lock:
            slots = list(self._slots)
        for slot in slots:
            slot.cancel()

    def pause(self, seconds: float) -> bool:
        """Wait; return early and True if the group is cancelled."""
        return self._cancelled.wait(seconds)

    def results(self, running: list[futures.Future[Result]]) -> list[Result]:
        """Return all results; on the first error end the other calls and raise it."""
        try:
            for done in futures.as_completed(running):
                done.result()
        except BaseException:
            self.cancel()
            futures.wait(running)
            raise
        return [done.result() for done in running]
