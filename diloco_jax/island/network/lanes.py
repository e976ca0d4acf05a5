"""An island's connections by fragment: to its worker, or to the coordinator itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

from diloco_jax.protocol.coordinator.workers import deal
from diloco_jax.protocol.messages import Hello
from diloco_jax.wire.bulk import (
    FetchRequest,
    Revocation,
    RevocationRequest,
    UploadStart,
)
from diloco_jax.wire.client import Client, ControlStream
from diloco_jax.wire.transfers import Fetched, Transfers


class Lanes:
    """Control messages to the coordinator, and bulk to and from the worker of each
    fragment, over connections of its own. Thread-safe.
    """

    def __init__(
        self,
        coordinator: Client,
        sizes: tuple[int, ...],
    ) -> None:
        """Begin with the coordinator alone, which `close` closes too. sizes: parameters
        by fragment."""
        self.coordinator, self._sizes = coordinator, sizes
        self._lock = threading.Lock()
        self._addresses: tuple[str, ...] = ()
        self._dealt: tuple[int, ...] = ()
        self.moved: Callable[[tuple[str, ...]], object] = lambda _: None
        """Called with new addresses, once they are in use."""

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
        # Those of a lead that was started again, if its workers ended with it.
        self.coordinator.leave_others(addresses)
        if addresses != before:
            self.moved(addresses)

    def open_control(self, hello: Hello) -> ControlStream:
        """Say hello to the coordinator; see `Client.open_control`. Its Welcome has the
        addresses of the workers."""
        stream = self.coordinator.open_control(hello)
        self.use(stream.welcome.workers)
        return stream

    def upload(
        self, start: UploadStart, payload: bytes | bytearray | memoryview
    ) -> int:
        """Send a delta to its fragment's worker; see `Transfers.upload`."""
        return self._of(start.fragment).upload(start, payload)

    def fetch(self, request: FetchRequest, *, max_bytes: int) -> Fetched:
        """Fetch a fragment from its worker; see `Transfers.fetch`."""
        return self._of(request.fragment).fetch(request, max_bytes=max_bytes)

    def is_revoked(self, serial: int) -> bool:
        """Ask the coordinator whether a certificate is revoked. Raises WireError."""
        request = RevocationRequest(serial=f"{serial:x}")
        return self.coordinator.transfers.ask(request, Revocation).revoked

    def close(self) -> None:
        """Close all connections."""
        self.coordinator.close()

    def _of(self, fragment: int) -> Transfers:
        with self._lock:
            if not self._addresses:
                return self.coordinator.transfers
            worker = self._dealt[fragment]
            address = self._addresses[worker]
        return self.coordinator.transfers_at(address, worker)
