"""The coordinator's end of the wire: one gRPC server for control and bulk.

Each control stream holds a thread. Uploads and fetches have a bounded number of places
(`places.py`), so that Status always gets through.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import grpc

from diloco_jax.deadlines import Deadlines
from diloco_jax.protocol.values import Version
from diloco_jax.wire import addresses, encoding, errors, frames
from diloco_jax.wire.bulk import FetchRequest, FetchStart, UploadDone, UploadStart
from diloco_jax.wire.encoding import decoded, encode
from diloco_jax.wire.errors import Busy, RemoteProtocolError, WireError
from diloco_jax.wire.peers import Peers
from diloco_jax.wire.places import Places, allow_connections
from diloco_jax.wire.principal import Principal, require_island, require_operator
from diloco_jax.wire.quota import Quota
from diloco_jax.wire.session import ControlHandlers, Session, internal_error
from diloco_jax.wire.threads import DaemonPool, Guard, IdleWatch
from diloco_jax.wire.tls import TlsFiles

logger = logging.getLogger(__name__)

SERVICE = "diloco.Coordinator"
_SPARE_THREADS = 8
_STREAMS_PER_CONNECTION = 64
SESSIONS_EACH = 4
"""Control streams of one island: a lost one may be back before its old stream is known
to be dead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FetchSource:
    """Bytes that a fetch is served from; `buffers`, row-major and end to end, are the
    payload."""

    version: Version
    full: bool
    """True: A_v in f32; False: `count` encoded publishes, oldest first."""
    count: int
    buffers: Sequence[bytes | bytearray | memoryview]
    total: int
    """Bytes of the payload: the sum of the buffers'."""


class Handlers(ControlHandlers, Protocol):
    """The coordinator's answers to calls; many threads call them at once."""

    def upload_begin(self, start: UploadStart) -> memoryview:
        """Return the writable place, `start.length` bytes, of this stripe.

        May raise Refused, Busy or RemoteProtocolError.
        """

    def upload_end(self, start: UploadStart, place: memoryview) -> bool:
        """Accept the checked stripe in the place from `upload_begin`; return True if it
        was the last."""

    def fetch(self, request: FetchRequest) -> FetchSource:
        """Return the bytes to serve a stripe from; may raise Refused or VersionGone."""

    def status(self) -> dict[str, Any]:
        """Return JSON-compatible state for `diloco status`; a new object if it has
        changed."""

    def keep(self, cycle: int) -> dict[str, Any]:
        """Keep a cycle, 0 = the next one that can be; return its number, the names of
        its files and, until it has any, the share that is kept. May raise Refused or
        Busy."""

    def kept(self, cycle: int, name: str) -> memoryview:
        """Return the bytes of a file of a kept cycle; may raise Refused or Busy."""


class Server:
    """The coordinator's gRPC server. It listens and serves from `start` to `stop`."""

    def __init__(
        self,
        bind: str,
        handlers: Handlers,
        *,
        tls: TlsFiles | None,
        deadlines: Deadlines,
        max_islands: int,
        max_hosts: int,
        bulk_channels: int,
        max_hosts_each: int | None = None,
        insecure: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise ConfigError if `bind` is malformed or must not go without TLS.

        max_hosts: hosts of all islands; each has its own streams for fragments.
        max_hosts_each: hosts of the largest island; None = max_hosts.
        config: the run's, JSON-compatible, for islands that have none of their own.
        """
        addresses.require_tls(bind, tls=tls is not None, insecure=insecure)
        self._bind, self._handlers, self._tls = bind, handlers, tls
        self._peers = Peers(tls.folder) if tls is not None else None
        self._deadlines = deadlines
        # Twice, since a lost island may be back before its old stream is known to be
        # dead.
        self._max_sessions = 2 * max_islands
        # A host may send and fetch on all of its channels at once.
        wanted = 2 * bulk_channels * max_hosts
        each = 2 * bulk_channels * (max_hosts_each or max_hosts)
        self._places = Places(wanted, deadlines.retry_max_s, each)
        self._threads = self._max_sessions + self._places.threads + _SPARE_THREADS
        # Twice, as with sessions.
        self._connections = 2 * max_hosts * (1 + bulk_channels)
        self._config = json.dumps(config or {}).encode()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sessions: dict[int, tuple[Principal | None, Session]] = {}
        self._quotas: dict[Principal, Quota] = {}
        self._encoded: tuple[dict[str, Any] | None, bytes] = (None, b"")
        """Last status that was asked for, so that many who ask cost one encoding."""

    def start(self) -> str:
        """Bind and serve; return `HOST:PORT` with the port that was bound.

        Raises ConfigError naming the address if it cannot be bound.
        """
        allow_connections(self._connections)
        host, _ = addresses.parse_address(self._bind)
        numeric = addresses.resolve(self._bind)
        self._watch = IdleWatch("diloco-server-watch")
        self._pool = DaemonPool(self._threads, "diloco-server")
        self._grpc = grpc.server(
            self._pool,
            handlers=(grpc.method_handlers_generic_handler(SERVICE, self._methods()),),
            options=server_options(self._deadlines),
        )
        try:
            if self._tls is None:
                port = self._grpc.add_insecure_port(numeric)
            else:
                port = self._grpc.add_secure_port(
                    numeric, self._tls.server_credentials()
                )
        except RuntimeError as error:
            self.stop(0.0)
            raise addresses.bind_error(numeric) from error
        self._grpc.start()
        return addresses.format_address(host, port)

    def hand_over(self, handlers: Handlers) -> None:
        """Let other handlers answer from here on. Open sessions end, so that their
        peers come to the new handlers."""
        with self._lock:
            self._handlers = handlers
            sessions = [session for _, session in self._sessions.values()]
        for session in sessions:
            session.close()

    def stop(self, grace_s: float) -> None:
        """Refuse new calls and send what is queued for sessions; cut off what still
        runs after `grace_s`."""
        stopped = self._grpc.stop(grace_s)
        with self._lock:
            sessions = [session for _, session in self._sessions.values()]
        for session in sessions:
            session.close()
        stopped.wait(grace_s + 1.0)
        self._pool.close(1.0)
        self._watch.close(1.0)

    def _methods(self) -> dict[str, Any]:
        return {
            "Control": grpc.stream_stream_rpc_method_handler(self._control),
            "Upload": grpc.stream_unary_rpc_method_handler(self._upload),
            "Fetch": grpc.unary_stream_rpc_method_handler(self._fetch),
            "Status": grpc.unary_unary_rpc_method_handler(self._status),
            "Keep": grpc.unary_unary_rpc_method_handler(self._keep),
            "Kept": grpc.unary_stream_rpc_method_handler(self._kept),
            "Config": grpc.unary_unary_rpc_method_handler(self._give_config),
        }

    def _control(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with self._answering(context):
            session = self._register(context)
        try:
            yield from session.serve(
                requests, self._handlers, self._watch, self._deadlines
            )
        finally:
            with self._lock:
                del self._sessions[session.id]

    def _upload(self, requests: Iterator[bytes], context: Any) -> bytes:
        with self._transfer(context) as guard:
            first = next(requests, None)
            if first is None:
                raise RemoteProtocolError(f"{context.peer()} sent an empty upload")
            start = decoded(encoding.upload_start, first, context.peer())
            require_island(self._identify(context), start.island)
            if not 0 <= start.offset <= start.offset + start.length <= start.total:
                raise RemoteProtocolError(
                    f"{context.peer()} announced bytes {start.offset} to "
                    f"{start.offset + start.length} of a payload of {start.total}"
                )
            place = self._handlers.upload_begin(start)
            _store(requests, start, place.cast("B"), guard, context.peer())
            complete = self._handlers.upload_end(start, place)
            return encode(UploadDone(complete=complete))

    def _fetch(self, request: bytes, context: Any) -> Iterator[bytes]:
        with self._transfer(context) as guard:
            wanted = decoded(encoding.fetch_request, request, context.peer())
            require_island(self._identify(context), wanted.island)
            source = self._handlers.fetch(wanted)
            if not (0 <= wanted.offset <= source.total and wanted.length >= -1):
                raise RemoteProtocolError(
                    f"{context.peer()} asked for {wanted.length} bytes from "
                    f"{wanted.offset} on, of a payload of {source.total}"
                )
            length = source.total - wanted.offset
            if wanted.length >= 0:
                length = min(length, wanted.length)
            yield encode(
                FetchStart(
                    version=source.version,
                    full=source.full,
                    count=source.count,
                    total=source.total,
                    offset=wanted.offset,
                    length=length,
                )
            )
            for frame in _frames(source.buffers, wanted.offset, length):
                guard.touch()
                yield frame

    def _status(self, request: bytes, context: Any) -> bytes:
        with self._answering(context):
            self._identify(context)
            status, encoded = self._encoded
            if (current := self._handlers.status()) is not status:
                encoded = json.dumps(current).encode()
                self._encoded = current, encoded
            return encoded

    def _keep(self, request: bytes, context: Any) -> bytes:
        with self._answering(context):
            require_operator(self._identify(context))
            wanted = decoded(encoding.cycle_request, request, context.peer())
            return json.dumps(self._handlers.keep(wanted.cycle)).encode()

    def _kept(self, request: bytes, context: Any) -> Iterator[bytes]:
        with self._transfer(context) as guard:
            require_operator(self._identify(context))
            wanted = decoded(encoding.cycle_request, request, context.peer())
            view = self._handlers.kept(wanted.cycle, wanted.name)
            for frame in frames.chunks(view):
                guard.touch()
                yield frame

    def _give_config(self, request: bytes, context: Any) -> bytes:
        with self._answering(context):
            self._identify(context)
            return self._config

    def _identify(self, context: Any) -> Principal | None:
        """Return who calls, None without TLS. Raises SecurityError."""
        return self._peers.identify(context) if self._peers is not None else None

    def _register(self, context: Any) -> Session:
        identify = functools.partial(self._identify, context)
        caller = identify()
        with self._lock:
            if len(self._sessions) >= self._max_sessions:
                raise Busy(
                    f"{len(self._sessions)} control streams are open, the limit is "
                    f"{self._max_sessions}; islands that are gone free theirs soon"
                )
            quota = None
            if caller is not None:
                own = sum(c == caller for c, _ in self._sessions.values())
                if own >= SESSIONS_EACH:
                    raise Busy(
                        f"{own} control streams of {caller} are open, the limit is "
                        f"{SESSIONS_EACH} each; those of ended processes close soon"
                    )
                quota = self._quotas.setdefault(caller, Quota(str(caller)))
            session = Session(next(self._numbers), context, identify, quota)
            self._sessions[session.id] = caller, session
            return session

    @contextlib.contextmanager
    def _transfer(self, context: Any) -> Iterator[Guard]:
        with (
            self._answering(context),
            self._places.taken(self._identify(context)),
            self._watch.guard(self._deadlines.idle_s, context.cancel) as guard,
        ):
            yield guard

    @contextlib.contextmanager
    def _answering(self, context: Any) -> Iterator[None]:
        """Turn an error raised inside into the status that the peer gets."""
        try:
            yield
        except grpc.RpcError:
            logger.info("a call from %s broke off", context.peer())
            raise
        except WireError as error:
            logger.info("answered %s: %s", context.peer(), error)
            errors.abort(context, error)
        except Exception as error:
            logger.exception("a call from %s failed", context.peer())
            errors.abort(context, internal_error(error))


def server_options(deadlines: Deadlines) -> list[tuple[str, Any]]:
    """Return gRPC's options: sizes, keepalive within the time budget, no shared
    port."""
    half_budget_ms = int(deadlines.budget_s * 500)
    return [
        *frames.SIZE_OPTIONS,
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
        ("grpc.keepalive_time_ms", half_budget_ms),
        ("grpc.keepalive_timeout_ms", half_budget_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients ping as often as this; gRPC would count that as abuse.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _store(
    requests: Iterator[bytes],
    start: UploadStart,
    place: memoryview,
    guard: Guard,
    peer: str,
) -> None:
    """Check an upload's chunks and copy them to their place."""
    stored = 0
    for frame in requests:
        part = frames.check(
            frame, offset=start.offset + stored, room=start.length - stored, peer=peer
        )
        place[stored : stored + len(part)] = part
        stored += len(part)
        guard.touch()
    if stored != start.length:
        raise RemoteProtocolError(
            f"{peer} announced {start.length} bytes and sent {stored}"
        )


def _frames(
    buffers: Sequence[bytes | bytearray | memoryview], offset: int, length: int
) -> Iterator[bytes]:
    """Frame bytes `offset` to `offset + length` of buffers laid end to end."""
    begin, end = 0, offset + length
    for buffer in buffers:
        view = memoryview(buffer)
        low, high = max(offset - begin, 0), min(end - begin, view.nbytes)
        if low < high:
            whole = memoryview(view if view.c_contiguous else view.tobytes())
            yield from frames.chunks(whole.cast("B")[low:high], begin + low)
        begin += view.nbytes
