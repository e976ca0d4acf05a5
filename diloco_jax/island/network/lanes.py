"""An island's connections by fragment: to its worker, or to the coordinator itself."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator

from diloco_jax.protocol.coordinator.workers import deal
from diloco_jax.protocol.messages import Hello
from diloco_jax.wire.bulk import (
    FetchRequest,
    Revocation,
    RevocationRequest,
    UploadStart,
)
from diloco_jax.wire.client import Client
from diloco_jax.wire.control import ControlStream
from diloco_jax.wire.errors import Busy, ConnectionLost
from diloco_jax.wire.transfers import Fetched, Transfers


class Lanes:
    """Control messages to the coordinator, and bulk to and from the worker of each
    fragment, over connections of its own. Thread-safe.
    """

    def __init__(
        self,
        coordinator: Client,
        sizes: tuple[int, ...],
        standby: Client | None = None,
        mandate_s: float = math.inf,
    ) -> None:
        """Begin with the coordinator alone, which `close` closes too. sizes: parameters
        by fragment. standby: that of the coordinator, which may serve in its place once
        that was silent for `mandate_s`.
        """
        self._servers = [coordinator] if standby is None else [coordinator, standby]
        self._sizes = sizes
        self._stall_s = math.inf if standby is None else mandate_s
        self._serving = self._dialled = 0
        """Numbers of the server to which bulk goes, and of that for the next hello."""
        self._welcomed = False
        """True on a host with a control stream, which knows who serves."""
        self._lock = threading.Lock()
        self._addresses: tuple[str, ...] = ()
        self._dealt: tuple[int, ...] = ()
        self.moved: Callable[[tuple[str, ...]], object] = lambda _: None
        """Called with new addresses, once they are in use."""

    @property
    def coordinator(self) -> Client:
        """The server that said welcome last."""
        return self._servers[self._serving]

    @property
    def dealt(self) -> tuple[int, ...]:
        """The worker of each fragment; empty if there are no workers."""
        return self._dealt

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the workers, as the coordinator last gave them."""
        return self._addresses

    def use(self, addresses: tuple[str, ...]) -> None:
        """Exchange bulk with workers at these addresses from now on; empty: with the
        coordinator. Raises ConfigError for one that must not go without TLS."""
        for worker, address in enumerate(addresses):
            self.coordinator.transfers_at(address, worker)
        with self._lock:
            before, self._addresses = self._addresses, addresses
            count = len(addresses)
            self._dealt = deal(self._sizes, count) if count else ()
        # Those of a lead that was started again, if its workers ended with it, and
        # those of a lead that leads no more: they serve on for a while.
        for server in self._servers:
            server.leave_others(addresses)
        if addresses != before:
            self.moved(addresses)

    def open_control(self, hello: Hello) -> ControlStream:
        """Say hello to the coordinator; see `Client.open_control`. One that is not
        there or does not lead has the next hello go to its standby, and back. Transfers
        with the one that does not serve end: it may be stopped, and never answer.

        Its Welcome has the addresses of the workers.
        """
        dialled = self._dialled
        try:
            stream = self._servers[dialled].open_control(hello)
        except (ConnectionLost, Busy):
            self._dialled = (dialled + 1) % len(self._servers)
            raise
        self._serving, self._welcomed = dialled, True
        for number, server in enumerate(self._servers):
            if number != dialled:
                server.transfers.interrupt()
        self.use(stream.welcome.workers)
        return stream

    def upload(
        self, start: UploadStart, payload: bytes | bytearray | memoryview
    ) -> int:
        """Send a delta to its fragment's worker; see `Transfers.upload`."""
        with self._followed():
            return self._of(start.fragment).upload(start, payload)

    def fetch(self, request: FetchRequest, *, max_bytes: int) -> Fetched:
        """Fetch a fragment from its worker; see `Transfers.fetch`."""
        with self._followed():
            return self._of(request.fragment).fetch(
                request, max_bytes=max_bytes, stall_s=self._stall_s
            )

    def is_revoked(self, serial: int) -> bool:
        """Ask the coordinator whether a certificate is revoked. Raises WireError."""
        request = RevocationRequest(serial=f"{serial:x}")
        with self._followed():
            return self.coordinator.transfers.ask(request, Revocation).revoked

    def close(self) -> None:
        """Close all connections."""
        for server in self._servers:
            server.close()

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        """Have the next transfer go to the other server if this one fails for the
        server's sake: a host without a control stream learns of a take-over so."""
        serving = self._serving
        try:
            yield
        except (ConnectionLost, Busy):
            knows = self._welcomed or self._addresses  # Workers are busy now and then.
            if self._serving == serving and not knows:
                self._serving = (serving + 1) % len(self._servers)
            raise

    def _of(self, fragment: int) -> Transfers:
        with self._lock:
            if not self._addresses:
                return self.coordinator.transfers
            worker = self._dealt[fragment]
            address = self._addresses[worker]
        return self.coordinator.transfers_at(address, worker)
