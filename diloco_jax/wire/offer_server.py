"""The bulk port of an island that offers its anchors to islands that join."""

from __future__ import annotations

from typing import Protocol

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire.bulk import FetchRequest, Holdings, HoldingsRequest, Request
from diloco_jax.wire.bulk_port import BulkPort
from diloco_jax.wire.connection import BulkConnection
from diloco_jax.wire.errors import Refused, RemoteProtocolError
from diloco_jax.wire.principal import Principal, require_island
from diloco_jax.wire.sources import FetchSource
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
    ) -> None:
        """Arguments are those of `BulkPort`. max_hosts: of all other islands."""
        super().__init__(
            tls=tls,
            deadlines=deadlines,
            max_hosts=max_hosts,
            bulk_channels=bulk_channels,
        )
        self._offers, self._run_id = offers, run_id

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
        if isinstance(request, HoldingsRequest):
            connection.send(self._offers.holdings(request.fragment))
        else:
            source = self._offers.offered(request)
            self.send_fetched(connection, request, source, guard)
