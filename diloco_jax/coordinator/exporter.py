"""The port from which Prometheus collects a run's numbers: `GET /metrics`.

On loopback it is plain HTTP; on any other address mutual TLS, with the certificates of
the run. A request reads a snapshot that the lead's thread made anyway, on a thread of
its own: it waits for nothing, and nothing waits for it.
"""

from __future__ import annotations

import contextlib
import http
import logging
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

from diloco_jax.observability.exported import Snapshot, families
from diloco_jax.wire import addresses
from diloco_jax.wire.principal import Peers
from diloco_jax.wire.threads import IdleWatch
from diloco_jax.wire.tls import TlsFiles

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

PATH = "/metrics"
REQUESTS_AT_ONCE = 4
"""Connections that are answered at once; one beyond them is closed."""
REQUEST_S = 10.0
"""Longest time for one request, the handshake included."""


class Exporter:
    """Serve the numbers of one run from `start` to `close`."""

    def __init__(
        self,
        bind: str,
        snapshot: Callable[[], Snapshot],
        *,
        tls: TlsFiles | None,
        insecure: bool,
    ) -> None:
        """Raise ConfigError if `bind` must not go without TLS, or cannot be bound.

        snapshot: returns the run as it was a moment ago; called on any thread."""
        addresses.require_tls(bind, tls=tls is not None, insecure=insecure)
        self._host, _ = addresses.parse_address(bind)
        self._secured = tls is not None and not addresses.is_loopback(self._host)
        numeric = addresses.resolve(bind)
        try:
            self._server = _Server(
                addresses.parse_address(numeric), tls if self._secured else None
            )
        except OSError as error:
            raise addresses.bind_error(numeric) from error
        self._server.page = self._page
        self._registry = _registry(snapshot)

    @property
    def url(self) -> str:
        """The address at which the numbers are, with the port that was bound."""
        scheme = "https" if self._secured else "http"
        at = addresses.format_address(self._host, self._server.server_address[1])
        return f"{scheme}://{at}{PATH}"

    def start(self) -> None:
        """Answer from now on."""
        thread = threading.Thread(
            target=self._server.serve_forever, name="diloco-metrics", daemon=True
        )
        thread.start()
        logger.info("metrics for Prometheus are at %s", self.url)

    def close(self) -> None:
        """Answer no longer, and close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._server.watch.close(1.0)

    def _page(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


def _registry(snapshot: Callable[[], Snapshot]) -> Any:
    """Return everything that is collected: the run, and this process's own CPU, memory
    and files by the names that Prometheus's libraries give them."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    class Run:
        def collect(self) -> Iterator[Metric]:
            return families(snapshot())

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Run())
    ProcessCollector(registry=registry)
    return registry


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    page: Callable[[], bytes]

    def __init__(self, address: tuple[str, int], tls: TlsFiles | None) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._contexts = tls.server_contexts() if tls is not None else None
        self._peers = Peers(tls.folder) if tls is not None else None
        self._places = threading.Semaphore(REQUESTS_AT_ONCE)
        super().__init__(address, _Handler)
        self.watch = IdleWatch("diloco-metrics-watch")

    @property
    def local(self) -> bool:
        """True if only this machine can ask."""
        return addresses.is_loopback(str(self.server_address[0]))

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service for this machine's name.
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread of its own, if there is a place."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # The system is out of threads.
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, on that thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands, if peers have to prove who they are, and answer."""
        if self._contexts is None or self._peers is None:
            with self.watch.guard(REQUEST_S, lambda: _cut(request)):
                super().finish_request(request, client_address)
            return
        context = self._contexts()
        with (
            context.wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            ) as secured,
            self.watch.guard(REQUEST_S, lambda: _cut(secured)),
        ):
            secured.do_handshake()
            certificate = secured.getpeercert(binary_form=True) or b""
            self._peers.identify(ssl.DER_cert_to_PEM_cert(certificate).encode())
            super().finish_request(secured, client_address)
            with contextlib.suppress(OSError):
                secured.unwrap()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell the log, quietly: a peer that fails is not this process's trouble."""
        logger.info("a request for metrics from %s failed", client_address[0])
        logger.debug("it failed with", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "diloco", ""

    def do_GET(self) -> None:
        """Answer one request."""
        from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

        host, kind = self.headers.get("host", ""), "text/plain"
        if self.server.local and not _names_this_machine(host):
            # A page of elsewhere whose name is made to lead here (DNS rebinding) asks
            # under its own name.
            text = f"ask for localhost or 127.0.0.1, not for {host[:80]!r}\n"
            status, body = http.HTTPStatus.FORBIDDEN, text.encode()
        elif self.path.partition("?")[0] != PATH:
            text = f"there is {PATH} alone\n"
            status, body = http.HTTPStatus.NOT_FOUND, text.encode()
        else:
            kind = CONTENT_TYPE_PLAIN_0_0_4
            status, body = http.HTTPStatus.OK, self.server.page()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-content-type-options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: Prometheus asks every few seconds."""


def _names_this_machine(host: str) -> bool:
    """Tell if a Host header is loopback's address or localhost, with a port or
    without."""
    name, colon, port = host.rpartition(":")
    name = name if colon and port.isdigit() else host
    return addresses.is_loopback(name.removeprefix("[").removesuffix("]").lower())


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
