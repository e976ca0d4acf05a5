"""The coordinator's bulk port: uploads, fetches and kept files."""

from __future__ import annotations

from typing import Protocol

from diloco_jax.deadlines import Deadlines
from diloco_jax.wire.bulk import (
    CycleRequest,
    FetchRequest,
    KeptStart,
    Request,
    Revocation,
    RevocationRequest,
    UploadDone,
    UploadStart,
)
from diloco_jax.wire.bulk_port import BulkPort
from diloco_jax.wire.connection import BulkConnection
from diloco_jax.wire.errors import RemoteProtocolError
from diloco_jax.wire.fetch_source import FetchSource
from diloco_jax.wire.few_lines import FewLines
from diloco_jax.wire.principal import Principal, require_island, require_operator
from diloco_jax.wire.threads import Guard
from diloco_jax.wire.tls import TlsFiles


class BulkHandlers(Protocol):
    """Answer the requests of the bulk port. Many threads call the methods at once."""

    def upload_begin(self, start: UploadStart) -> memoryview:
        """Return the memory into which this stripe is received, `start.length` bytes;
        or a shorter place if the stripe has arrived before, and its bytes go nowhere.

        Bytes are written there as they arrive, before their checksum is compared. The
        server releases the place at the end, whatever that is. May raise Refused, Busy
        or RemoteProtocolError.
        """

    def upload_end(self, start: UploadStart, place: memoryview) -> bool:
        """Accept a received and checked stripe; return True if it completes the delta.
        `place` is the memory that `upload_begin` returned.
        """

    def fetch(self, request: FetchRequest) -> FetchSource:
        """Return the payload of which a stripe is asked for. May raise Refused or
        VersionGone.
        """

    def kept(self, cycle: int, name: str) -> memoryview:
        """Return the bytes of a file of a kept cycle; may raise Refused or Busy."""


class BulkServer(BulkPort):
    """The bulk port of a coordinator or of a worker."""

    def __init__(
        self,
        handlers: BulkHandlers,
        *,
        tls: TlsFiles | None,
        deadlines: Deadlines,
        max_hosts: int,
        bulk_channels: int,
        max_hosts_each: int | None = None,
        lines: FewLines | None = None,
    ) -> None:
        """Arguments are those of `server.Server`, and of `BulkPort`."""
        super().__init__(
            tls=tls,
            deadlines=deadlines,
            max_hosts=max_hosts,
            bulk_channels=bulk_channels,
            max_hosts_each=max_hosts_each,
            lines=lines,
        )
        self.handlers = handlers
        """May be replaced at any time; transfers under way end with the old ones."""

    def carry_out(
        self,
        connection: BulkConnection,
        who: Principal | None,
        request: Request,
        guard: Guard,
    ) -> None:
        """Carry out a request of `who`, None without TLS."""
        match request:
            case UploadStart():
                require_island(who, request.island)
                self._upload(connection, request, guard)
            case FetchRequest():
                require_island(who, request.island)
                self.send_fetched(
                    connection, request, self.handlers.fetch(request), guard
                )
            case RevocationRequest():
                peers, serial = self._peers, int(request.serial, 16)
                revoked = peers is not None and peers.is_revoked(serial)
                connection.send(Revocation(revoked=revoked))
            case CycleRequest():
                require_operator(who)
                view = self.handlers.kept(request.cycle, request.name)
                connection.send(KeptStart(total=view.nbytes))
                self.send_payload(connection, [view], 0, view.nbytes, guard)
            case _:
                raise RemoteProtocolError(
                    f"{connection.peer} sent a {type(request).__name__}, which goes to "
                    f"an island that offers its anchors; check islands.NAME.offers"
                )

    def _upload(
        self,
        connection: BulkConnection,
        start: UploadStart,
        guard: Guard,
    ) -> None:
        if not 0 <= start.offset <= start.offset + start.length <= start.total:
            raise RemoteProtocolError(
                f"{connection.peer} announced bytes {start.offset} to "
                f"{start.offset + start.length} of a payload of {start.total}"
            )
        handlers = self.handlers
        with handlers.upload_begin(start) as place:
            with place.cast("B") as view:
                _receive(connection, view, start, guard)
            complete = handlers.upload_end(start, place)
        connection.send(UploadDone(complete=complete))


def _receive(
    connection: BulkConnection,
    view: memoryview,
    start: UploadStart,
    guard: Guard,
) -> None:
    """Receive a stripe into its place, or chunk by chunk into the same shorter one."""
    stored, wanted = 0, len(view) == start.length
    while left := start.length - stored:
        room = view[stored:] if wanted else view[:left]
        stored += connection.receive_chunk(room, start.offset + stored, guard)
