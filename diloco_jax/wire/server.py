"""The coordinator's end of the wire: a gRPC server for control, a bulk port beside it.

The bulk port (`bulk_server.py`) is the next one of the same address.
Each control stream holds a thread.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc

from diloco_jax.config.placement import Deadlines
from diloco_jax.wire import addresses, bulk, errors
from diloco_jax.wire.bulk import Decoded, decoded
from diloco_jax.wire.bulk_server import BulkServer
from diloco_jax.wire.errors import Busy
from diloco_jax.wire.peers import (
    OPERATOR,
    DaemonPool,
    IdleWatch,
    Principal,
    Quota,
    RateLimitedLog,
    TransferSlots,
    allow_connections,
    require,
)
from diloco_jax.wire.session import Handlers, Session, log_about
from diloco_jax.wire.tls import Peers, TlsFiles

logger = logging.getLogger(__name__)

SERVICE = "diloco.Coordinator"
CALLS, CALLS_EACH = 24, 4
"""Calls that are no streams at once, and those of one peer: each holds a thread that is
not one of the sessions'."""
_SPARE_THREADS = CALLS + 8
_SPARE_CONNECTIONS = 64
"""Connections for status and for handshakes, besides twice those of all sessions."""
_STREAMS_PER_CONNECTION = 16
SESSIONS_EACH = 4
"""Control streams of one island: a lost one may be back before its old stream is known
to be dead."""


class Server:
    """Both ports of a coordinator. They listen and serve from `start` to `stop`."""

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
        self._peers = Peers(tls.folder if tls is not None else None)
        self._deadlines = deadlines
        # Twice, since a lost island may be back before its old stream is known to be
        # dead.
        self._max_sessions = 2 * max_islands
        self._lines = RateLimitedLog()
        self._calls = TransferSlots(CALLS, 0.0, CALLS_EACH, "calls")
        self._bulk = BulkServer(
            handlers,
            tls=tls,
            deadlines=deadlines,
            max_hosts=max_hosts,
            bulk_channels=bulk_channels,
            max_hosts_each=max_hosts_each,
            log=self._lines,
        )
        # Twice, as with sessions.
        control = max(2 * max_hosts, 2 * self._max_sessions + _SPARE_CONNECTIONS)
        self._connections = control + self._bulk.connections
        self._config = json.dumps(config or {}).encode()
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._sessions: dict[int, tuple[Principal | None, Session]] = {}
        self._quotas: dict[Principal, Quota] = {}
        self._encoded: tuple[dict[str, Any] | None, bytes] = (None, b"")
        """Last status that was asked for, encoded once for all who ask."""

    def start(self) -> str:
        """Bind and serve; return `HOST:PORT` with the port of control that was bound.
        Bulk is served at the next one.

        Raises ConfigError naming the address if one cannot be bound.
        """
        # What they leave is for the run's own files.
        allowed = allow_connections(self._connections)
        control = self._connections - self._bulk.connections
        self._bulk.connections = min(
            self._bulk.connections, max(allowed - control, allowed // 2)
        )
        host, _ = addresses.parse_address(self._bind)
        numeric, beside = addresses.reserve(addresses.resolve(self._bind))
        self._watch = IdleWatch("diloco-server-watch")
        threads = self._max_sessions + _SPARE_THREADS
        self._pool = DaemonPool(threads, "diloco-server")
        self._pool.submit(int)  # One thread stays, whatever the system refuses later.
        self._grpc = grpc.server(
            self._pool,
            handlers=(grpc.method_handlers_generic_handler(SERVICE, self._methods()),),
            options=server_options(self._deadlines, 2 * self._max_sessions),
        )
        try:
            if self._tls is None:
                port = self._grpc.add_insecure_port(numeric)
            else:
                port = self._grpc.add_secure_port(
                    numeric, self._tls.server_credentials()
                )
        except RuntimeError as error:
            beside.close()
            self.stop(0.0)
            raise addresses.bind_error(numeric) from error
        self._bulk.start(beside)
        self._grpc.start()
        return addresses.format_address(host, port)

    def hand_over(self, handlers: Handlers) -> None:
        """Let other handlers answer from here on. Open sessions end, so that their
        peers come to the new handlers."""
        self._bulk.handlers = handlers
        with self._lock:
            self._handlers = handlers
        self._close_sessions()

    def stop(self, grace_s: float) -> None:
        """Refuse new calls and send what is queued for sessions; cut off what still
        runs after `grace_s`."""
        stopped = self._grpc.stop(grace_s)
        self._close_sessions()
        self._bulk.stop(grace_s)
        stopped.wait(grace_s + 1.0)
        self._pool.close(1.0)
        self._watch.close(1.0)

    def _close_sessions(self) -> None:
        with self._lock:
            sessions = [session for _, session in self._sessions.values()]
        for session in sessions:
            session.close()

    def _methods(self) -> dict[str, Any]:
        return {
            "Control": grpc.stream_stream_rpc_method_handler(self._control),
            "Status": self._call(lambda request, caller, peer: self._status()),
            "Config": self._call(lambda request, caller, peer: self._config),
            "Keep": self._order(
                bulk.cycle_request, lambda order: self._handlers.keep(order.cycle)
            ),
            "Steer": self._order(bulk.steer, lambda order: self._handlers.steer(order)),
            "Profile": self._order(
                bulk.profile_order, lambda order: self._handlers.profile(order)
            ),
        }

    def _order(
        self,
        decode: Callable[[bytes], Decoded],
        answer: Callable[[Decoded], dict[str, Any]],
    ) -> Any:
        """Make the handler of an operator's call."""

        def carry_out(request: bytes, caller: Principal | None, peer: str) -> bytes:
            require(caller, OPERATOR)
            return json.dumps(answer(decoded(decode, request, peer))).encode()

        return self._call(carry_out)

    def _call(self, answer: Callable[[bytes, Principal | None, str], bytes]) -> Any:
        """Make the handler of a call with one request.

        To gRPC it is a stream: so the caller is known, and the wait for its request
        has an end, before there is a request."""

        def handle(requests: Iterator[bytes], context: Any) -> bytes:
            with self._answering(context):
                caller = self._identify(context)
                with self._calls.taken(caller):
                    connect_s = self._deadlines.connect_s
                    with self._watch.guard(connect_s, context.cancel):
                        request = next(requests, b"")
                    return answer(request, caller, context.peer())

        return grpc.stream_unary_rpc_method_handler(handle)

    def _control(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        with self._answering(context):
            session = self._register(context)
        try:
            yield from session.serve(requests, self._watch, self._deadlines)
        finally:
            with self._lock:
                del self._sessions[session.id]

    def _status(self) -> bytes:
        status, encoded = self._encoded
        if (current := self._handlers.status()) is not status:
            encoded = json.dumps(current).encode()
            self._encoded = current, encoded
        return encoded

    def _identify(self, context: Any) -> Principal | None:
        """Return who calls, None without TLS. Raises WireError."""
        (pem,) = context.auth_context().get("x509_pem_cert", [b""])
        return self._peers.identify(pem)

    def _register(self, context: Any) -> Session:
        identify = functools.partial(self._identify, context)
        caller = identify()
        with self._lock:
            if len(self._sessions) >= self._max_sessions:
                raise Busy(
                    f"{len(self._sessions)} control streams are open, the limit is "
                    f"{self._max_sessions}; islands that are gone free theirs soon"
                )
            quota = Quota(str(caller or context.peer()))
            if caller is not None:
                own = sum(c == caller for c, _ in self._sessions.values())
                if own >= SESSIONS_EACH:
                    raise Busy(
                        f"{own} control streams of {caller} are open, the limit is "
                        f"{SESSIONS_EACH} each; those of ended processes close soon"
                    )
                quota = self._quotas.setdefault(caller, quota)
            number = next(self._numbers)
            session = Session(
                number, context, self._handlers, identify, quota, self._lines
            )
            self._sessions[number] = caller, session
            return session

    @contextlib.contextmanager
    def _answering(self, context: Any) -> Iterator[None]:
        """Turn an error raised inside into the status that the peer gets."""
        identify = functools.partial(self._identify, context)
        try:
            yield
        except grpc.RpcError:
            text = f"a call from {context.peer()} broke off"
            log_about(self._lines, logger, logging.INFO, identify, text)
            raise
        except Exception as error:
            level, telling = errors.told(error)
            text = f"answered {context.peer()}: {telling}"
            log_about(self._lines, logger, level, identify, text)
            errors.abort(context, telling)


def server_options(deadlines: Deadlines, connections: int) -> list[tuple[str, Any]]:
    """Return gRPC's options: sizes, keepalive within the time budget, no shared port,
    and no more connections than these, nor handshakes that do not end, nor connections
    that are not used."""
    return [
        *keepalive_options(deadlines),
        ("grpc.server_handshake_timeout_ms", int(deadlines.connect_s * 1000)),
        ("grpc.max_allowed_incoming_connections", connections + _SPARE_CONNECTIONS),
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
        # A connection with a call stays; others come back when they are needed.
        ("grpc.max_connection_idle_ms", int(deadlines.idle_s * 1000)),
        # Clients ping as often as this; gRPC would count that as abuse.
        ("grpc.http2.max_ping_strikes", 0),
    ]


def keepalive_options(deadlines: Deadlines) -> list[tuple[str, Any]]:
    """Return the options of both ends: sizes, and keepalive within the time budget."""
    half_budget_ms = int(deadlines.budget_s * 500)
    return [
        *bulk.SIZE_OPTIONS,
        ("grpc.keepalive_time_ms", half_budget_ms),
        ("grpc.keepalive_timeout_ms", half_budget_ms),
        # Without it, a peer that is stopped and not gone is noticed after a minute.
        ("grpc.http2.ping_timeout_ms", half_budget_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
