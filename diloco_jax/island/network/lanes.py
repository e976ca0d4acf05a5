"""The island's way to each fragment: to its worker, or to the coordinator itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

from diloco_jax.protocol.coordinator.workers import deal
from diloco_jax.protocol.messages import Hello
from diloco_jax.wire.bulk import FetchRequest, UploadStart
from diloco_jax.wire.client import Client
from diloco_jax.wire.control import ControlStream
from diloco_jax.wire.transfers import Fetched


class Lanes:
    """Control to the coordinator; deltas and fragments to and from its workers, each
    over connections of its own. Thread-safe."""

    def __init__(
        self,
        connect: Callable[[str], Client],
        coordinator: str,
        sizes: tuple[int, ...],
    ) -> None:
        """connect: returns a client of a HOST:PORT. sizes: parameters by fragment."""
        self._connect, self._sizes = connect, sizes
        self.coordinator = connect(coordinator)
        self._lock = threading.Lock()
        self._workers: dict[str, Client] = {}
        """Clients of workers, by address; those of earlier addresses stay until the
        end, as transfers may be under way."""
        self._addresses: tuple[str, ...] = ()
        self._dealt: tuple[int, ...] = ()

    @property
    def dealt(self) -> tuple[int, ...]:
        """The worker of each fragment; empty: there are no workers."""
        return self._dealt

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where workers serve, as last heard."""
        return self._addresses

    def use(self, addresses: tuple[str, ...]) -> None:
        """Exchange bulk with workers at these addresses from now on; empty: with the
        coordinator. Raises ConfigError for one that must not go without TLS."""
        with self._lock:
            for address in addresses:
                if address not in self._workers:
                    self._workers[address] = self._connect(address)
            self._addresses = addresses
            count = len(addresses)
            self._dealt = deal(self._sizes, count) if count else ()

    def open_control(self, hello: Hello) -> ControlStream:
        """Say hello to the coordinator; see `Client.open_control`. Its Welcome says
        where workers are."""
        stream = self.coordinator.open_control(hello)
        self.use(stream.welcome.workers)
        return stream

    def upload(
        self, start: UploadStart, payload: bytes | bytearray | memoryview
    ) -> int:
        """Send a delta to its fragment's worker; see `Transfers.upload`."""
        return self._of(start.fragment).transfers.upload(start, payload)

    def fetch(self, request: FetchRequest, *, max_bytes: int) -> Fetched:
        """Fetch a fragment from its worker; see `Transfers.fetch`."""
        of_worker = self._of(request.fragment)
        return of_worker.transfers.fetch(request, max_bytes=max_bytes)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            workers = list(self._workers.values())
        for client in (self.coordinator, *workers):
            client.close()

    def _of(self, fragment: int) -> Client:
        with self._lock:
            if not self._addresses:
                return self.coordinator
            return self._workers[self._addresses[self._dealt[fragment]]]
