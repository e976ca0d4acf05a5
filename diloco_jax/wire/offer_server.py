"""The bulk port of an island that offers its anchors to islands that join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire.bulk import FetchRequest, Holdings, HoldingsRequest, Request
from diloco_jax.wire.bulk_port import BulkPort
from diloco_jax.wire.connection import BulkConnection
from diloco_jax.wire.errors import Refused, RemoteProtocolError
from diloco_jax.wire.fetch_source import FetchSource
from diloco_jax.wire.principal import Principal, require_island
from diloco_jax.wire.revocation import Revocations
from diloco_jax.wire.threads import Guard
from diloco_jax.wire.tls import TlsFiles


class OfferHandlers(Protocol):
    """Answers of the island; many threads call the methods at once."""

    def holdings(self, fragment: int) -> Holdings:
        """Return the version of this host's part of a fragment's anchor, and its tiles.
        Raises RemoteProtocolError for a fragment that there is not."""

    def offered(self, request: FetchRequest) -> FetchSource:
        """Return the tiles that are asked for. Raises VersionGone, or
        RemoteProtocolError."""


class OfferServer(BulkPort):
    """Answers other islands of the run, and nobody else."""

    def __init__(
        self,
        offers: OfferHandlers,
        run_id: str,
        *,
        tls: TlsFiles | None,
        deadlines: Deadlines,
        max_hosts: int,
        bulk_channels: int,
        is_revoked: Callable[[int], bool],
    ) -> None:
        """Arguments are those of `BulkPort`. max_hosts: of all other islands.
        is_revoked: asks the coordinator; see `Revocations`."""
        super().__init__(
            tls=tls,
            deadlines=deadlines,
            max_hosts=max_hosts,
            bulk_channels=bulk_channels,
        )
        self._offers, self._run_id = offers, run_id
        self._revocations = Revocations(is_revoked)

    def carry_out(
        self,
        connection: BulkConnection,
        who: Principal | None,
        request: Request,
        guard: Guard,
    ) -> None:
        """Answer another island of the run."""
        if not isinstance(request, HoldingsRequest | FetchRequest):
            raise RemoteProtocolError(
                f"{connection.peer} sent a {type(request).__name__} to an island, "
                f"which goes to the coordinator; check its address"
            )
        require_island(who, request.island)
        if request.run_id != self._run_id:
            raise Refused(
                "run",
                f"the island that is asked is in run {self._run_id!r}, and the call is "
                f"of run {request.run_id!r}; check islands.NAME.offers",
            )
        if self._peers is not None:
            caller, serial = self._peers.named_in(connection.certificate())
            self._revocations.require_valid(serial, caller)
        if isinstance(request, HoldingsRequest):
            connection.send(self._offers.holdings(request.fragment))
        else:
            source = self._offers.offered(request)
            self.send_fetched(connection, request, source, guard)
