"""Wire -> host -> device: one published version of a fragment."""

from __future__ import annotations

from typing import Any, Protocol

from diloco_jax.island.arrivals import Arrival
from diloco_jax.island.device.exchange import Exchange
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.protocol.island.conversation import MAX_CHAIN
from diloco_jax.protocol.island.fetching import Fetch
from diloco_jax.wire.bulk import FetchRequest, Identity


class Fetches(Protocol):
    """Calls of a `wire.Client` that the fetcher needs."""

    def fetch(self, request: FetchRequest, *, max_bytes: int) -> Any:
        """Return a `Fetched`: version, full, count, payload, wire_bytes."""
        ...


class Fetcher:
    """Fetch this host's part of versions. Any thread may call it."""

    def __init__(
        self, client: Fetches, identity: Identity, exchange: Exchange, mailbox: Mailbox
    ) -> None:
        self._client, self._identity = client, identity
        self._exchange, self._mailbox = exchange, mailbox

    def fetch(self, fetch: Fetch) -> Arrival:
        """Fetch everything that leads from `have` to `want`; A in full if `have` is
        None, or too old.

        Raises VersionGone if the version is not kept any more, or another WireError.
        """
        exchange, fragment = self._exchange, fetch.fragment
        part = exchange.part_down(fragment)
        size = exchange.layouts_down[fragment].part_bytes(part)
        fetched = self._client.fetch(
            FetchRequest(
                **self._identity.fields(),
                fragment=fragment,
                want=fetch.want,
                have=fetch.have,
                part=part,
            ),
            max_bytes=max(exchange.anchor_bytes(fragment), MAX_CHAIN * size),
        )
        payload = memoryview(fetched.payload)
        if fetched.full:
            self._mailbox.count(bytes_join=fetched.wire_bytes)
            return Arrival(
                fragment=fragment,
                version=fetched.version,
                anchor=exchange.put_anchor(fragment, payload),
            )
        self._mailbox.count(bytes_down=fetched.wire_bytes)
        parts = [payload[i * size : (i + 1) * size] for i in range(fetched.count)]
        return Arrival(
            fragment=fragment,
            version=fetched.version,
            publishes=tuple(exchange.put_publish(fragment, p) for p in parts),
        )
