"""Bulk ports: the coordinator's for uploads, fetches and kept files, and that of an
island that offers its anchors to islands that join.

A transfer holds a thread and a place until it is done. A peer that sends no request
loses its place after `connect_s`, and one that stops in the middle of a payload after
`idle_s`. Connections without a transfer wait in `acceptor.py`, those that are refused
included. It bounds them, and so the transfers that wait for a thread.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from diloco_jax.deadlines import Deadlines
from diloco_jax.protocol.values import Version
from diloco_jax.wire import encoding, errors, frames, session
from diloco_jax.wire.acceptor import Acceptor, Places
from diloco_jax.wire.bulk import (
    CycleRequest,
    FetchRequest,
    FetchStart,
    Holdings,
    HoldingsRequest,
    KeptStart,
    Request,
    Revocation,
    RevocationRequest,
    UploadDone,
    UploadStart,
)
from diloco_jax.wire.errors import (
    Busy,
    ConnectionLost,
    Refused,
    RemoteProtocolError,
    WireError,
)
from diloco_jax.wire.frames import BulkConnection, Payload
from diloco_jax.wire.principal import (
    Peers,
    Principal,
    Revocations,
    require_island,
    require_lead,
    require_operator,
)
from diloco_jax.wire.session import FewLines, Quota, internal_error
from diloco_jax.wire.threads import DaemonPool, Guard, IdleWatch
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

BLOCK_BYTES = 4 << 20
"""Bytes that a fetch copies at a time, of parts that lie scattered in memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchSource:
    """The payload that a fetch is served from: `buffers`, row-major, laid end to
    end.
    """

    version: Version
    full: bool
    """True: A_v in f32; False: `count` encoded publishes, oldest first."""
    count: int
    buffers: Sequence[Payload]
    total: int
    """Bytes of the payload: the sum of the buffers'."""


def source_of(
    version: Version, boxes: Sequence[npt.NDArray[Any]], *, count: int
) -> FetchSource:
    """Return the payload of these boxes: `count` publishes, or for 0 an anchor."""
    return FetchSource(
        version=version,
        full=count == 0,
        count=count,
        buffers=[block.data for box in boxes for block in _blocks(box)],
        total=sum(box.nbytes for box in boxes),
    )


def _blocks(box: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    """Cut an array that is scattered in memory, so that the copy of each block, made
    when it is sent, is small."""
    if box.flags.c_contiguous or not box.size:
        return [box]
    rows = max(1, BLOCK_BYTES * len(box) // box.nbytes)
    return [box[start : start + rows] for start in range(0, len(box), rows)]


_SPARE_CONNECTIONS = 64


class BulkPort(abc.ABC):
    """One bulk port. It listens and serves from `start` to `stop`."""

    def __init__(
        self,
        *,
        tls: TlsFiles | None,
        deadlines: Deadlines,
        max_hosts: int,
        bulk_channels: int,
        max_hosts_each: int | None = None,
        lines: FewLines | None = None,
    ) -> None:
        """Arguments are those of `server.Server`. lines: of its log about peers; None =
        lines of this port alone."""
        self._lines = lines or FewLines()
        self._contexts = tls.server_contexts() if tls is not None else lambda: None
        self._peers = Peers(tls.folder) if tls is not None else None
        self._deadlines = deadlines
        # A host may send and fetch on all of its channels at once.
        wanted = 2 * bulk_channels * max_hosts
        each = 2 * bulk_channels * (max_hosts_each or max_hosts)
        self._places = Places(wanted, deadlines.retry_max_s, each)
        self._each = each
        self._quotas: dict[Principal, Quota] = {}
        self.connections = 2 * wanted + _SPARE_CONNECTIONS
        """Most connections: twice what all hosts need, since a lost host may be back
        before its old ones are known to be dead."""
        self._watch = IdleWatch("diloco-bulk-watch")
        self._pool = DaemonPool(self._places.threads, "diloco-bulk")
        self._acceptor: Acceptor | None = None
        self._changed = threading.Condition()
        self._serving: set[BulkConnection] = set()

    def start(self, listener: socket.socket) -> None:
        """Serve what comes to a socket that listens, which is closed at the end."""
        self._pool.submit(int)  # One thread stays, whatever the system refuses later.
        self._acceptor = Acceptor(
            listener,
            self._contexts,
            self._begin,
            self._deadlines,
            self.connections,
            most_each=2 * self._each,
            check=self._identify,
        )
        self._acceptor.start()

    def stop(self, grace_s: float) -> None:
        """Accept nothing more; cut off transfers that still run after `grace_s`."""
        deadline = time.monotonic() + grace_s
        if self._acceptor is not None:
            self._acceptor.stop()
        with self._changed:
            self._changed.wait_for(
                lambda: not self._serving, max(0.0, deadline - time.monotonic())
            )
            for connection in self._serving:
                connection.cut()
        self._pool.close(1.0)
        self._watch.close(1.0)

    def _begin(self, connection: BulkConnection) -> None:
        """Serve what a connection asks for, on a thread of the pool."""
        with self._changed:
            self._serving.add(connection)
        connection.between = False
        try:
            self._pool.submit(self._serve, connection)
        except RuntimeError:  # The pool is closed, or the system out of threads.
            self._done(connection)

    def _serve(self, connection: BulkConnection) -> None:
        try:
            self.answer(connection)
        finally:
            self._done(connection)

    def _done(self, connection: BulkConnection) -> None:
        with self._changed:
            self._serving.discard(connection)
            self._changed.notify_all()
        assert self._acceptor is not None
        self._acceptor.give_back(connection)

    def answer(self, connection: BulkConnection) -> None:
        """Receive one request and carry it out. If it fails, tell the peer why."""
        try:
            with contextlib.ExitStack() as held:
                self._answer(connection, held)
        except ConnectionLost as error:
            self._log(logging.INFO, connection, f"a transfer broke off: {error}")
        except WireError as error:
            # Who is told to come again does so many times.
            level = logging.DEBUG if isinstance(error, Busy) else logging.INFO
            self._log(level, connection, f"answered {connection.peer}: {error}")
            connection.part(errors.failure_of(error))
        except Exception as error:
            text = f"a transfer with {connection.peer} failed"
            self._log(logging.ERROR, connection, text)
            connection.part(errors.failure_of(internal_error(error)))

    def _log(self, level: int, connection: BulkConnection, text: str) -> None:
        who = None
        with contextlib.suppress(WireError):
            who = self._identify(connection)
        self._lines.log(logger, level, who, text, trace=level >= logging.ERROR)

    def _answer(self, connection: BulkConnection, held: contextlib.ExitStack) -> None:
        who = self._identify(connection)
        held.enter_context(self._places.taken(who))
        if who is not None:
            time.sleep(self._quota(who).wait_s(1))
        with self._watch.guard(self._deadlines.connect_s, connection.cut):
            request = connection.receive(encoding.bulk_request)
        guard = held.enter_context(
            self._watch.guard(self._deadlines.idle_s, connection.cut)
        )
        self.carry_out(connection, who, request, guard)
        connection.between = True

    @abc.abstractmethod
    def carry_out(
        self,
        connection: BulkConnection,
        who: Principal | None,
        request: Request,
        guard: Guard,
    ) -> None:
        """Carry out a request of `who`, None without TLS."""

    def send_fetched(
        self,
        connection: BulkConnection,
        wanted: FetchRequest,
        source: FetchSource,
        guard: Guard,
    ) -> None:
        """Send the stripe of the payload that is asked for."""
        if not (0 <= wanted.offset <= source.total and wanted.length >= -1):
            raise RemoteProtocolError(
                f"{connection.peer} asked for {wanted.length} bytes from "
                f"{wanted.offset} on, of a payload of {source.total}"
            )
        length = source.total - wanted.offset
        if wanted.length >= 0:
            length = min(length, wanted.length)
        connection.send(
            FetchStart(
                version=source.version,
                full=source.full,
                count=source.count,
                total=source.total,
                offset=wanted.offset,
                length=length,
            )
        )
        self.send_payload(connection, source.buffers, wanted.offset, length, guard)

    def send_payload(
        self,
        connection: BulkConnection,
        buffers: Sequence[frames.Payload],
        offset: int,
        length: int,
        guard: Guard,
    ) -> None:
        """Send a part of a payload; ConnectionLost if the peer ends it."""
        if not connection.send_payload(buffers, offset, length, guard):
            raise ConnectionLost(f"{connection.peer} ended a fetch")

    def _identify(self, connection: BulkConnection) -> Principal | None:
        """Return who calls, None without TLS. Raises WireError."""
        if self._peers is None:
            return None
        return self._peers.identify(connection.certificate())

    def _quota(self, who: Principal) -> Quota:
        """Return the quota of one peer's requests, over all of its connections."""
        rate = max(session.REQUESTS_PER_SECOND * self._each, session.LEAST_REQUESTS)
        fresh = Quota(str(who), rate, session.BURST_S * rate, "requests for bulk")
        return self._quotas.setdefault(who, fresh)


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
                if request.theta:
                    require_lead(who, "a worker")
                else:
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
