"""The page and its data over HTTP: to this machine alone, and only to read.

Threads keep a timeline and a status up to date while the page is served.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diloco_jax.dashboard.run_readers import Telling
from diloco_jax.dashboard.timeline import Timeline
from diloco_jax.dashboard.view import Window, find_events, view
from diloco_jax.errors import ConfigError
from diloco_jax.observability.measures import health_of
from diloco_jax.wire.errors import WireError

logger = logging.getLogger(__name__)

LINES_EVERY_S = 1.0
STATUS_EVERY_S = 2.0
AT_ONCE = 5_000
"""Lines taken under one hold of the lock: the page is served between them."""
STOP_S = 5.0
SHORTEST_S = 0.01
EVENTS_SHOWN = 200


class Onlooker:
    """A run as it is told by a source, for any number of readers.

    A context manager: its threads run inside the block. However many pages are open,
    the coordinator is asked once every `STATUS_EVERY_S`.
    """

    def __init__(self, source: Telling, link_bytes_per_s: float = 0.0) -> None:
        """link_bytes_per_s: of each island's link, each way; 0 = not known."""
        self._source, self._link_bytes_per_s = source, link_bytes_per_s
        self._timeline = Timeline()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._status: dict[str, Any] = {}
        self._threads = [
            threading.Thread(target=self._every, args=pair, daemon=True)
            for pair in ((STATUS_EVERY_S, self.ask), (LINES_EVERY_S, self.read))
        ]

    def __enter__(self) -> Onlooker:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(STOP_S)

    def ask(self) -> None:
        """Read the status once."""
        try:
            self._status = self._source.status()
        except (WireError, ConfigError, OSError) as error:
            self._status = {"unreachable": str(error)}

    def read(self) -> None:
        """Take all lines that are new."""
        lines = iter(self._source.new(self._timeline))
        while not self._over.is_set():
            if not (batch := list(itertools.islice(lines, AT_ONCE))):
                return
            with self._lock:
                for _, take, line in batch:
                    take(line)

    def view(
        self, start: float | None, stop: float | None, columns: int
    ) -> dict[str, Any]:
        """Return what the page shows; None: from the beginning, or to the newest."""
        status, facts = self._status, self._source.facts()
        with self._lock:
            window = self._window(start, stop, columns)
            shown = view(self._timeline, window, facts["flops_per_token"])
        return {
            **shown,
            "now": time.time(),
            "run": {**facts, "link_bytes_per_s": self._link_bytes_per_s},
            "health": health_of(status),
            "read": round(self._source.read_share(), 3),
            "status": status,
        }

    def events(
        self, wanted: str, start: float | None, stop: float | None
    ) -> dict[str, Any]:
        """Return events of a window that have all the words, the newest first."""
        with self._lock:
            window = self._window(start, stop, 1)
            return find_events(
                self._timeline, wanted, window.start, window.stop, EVENTS_SHOWN
            )

    def _window(self, start: float | None, stop: float | None, columns: int) -> Window:
        newest = self._timeline.newest
        stop = newest + SHORTEST_S if stop is None else stop
        start = (self._timeline.grid.begin or 0.0) if start is None else start
        return Window(start=start, stop=max(stop, start + SHORTEST_S), columns=columns)

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        while not self._over.is_set():
            try:
                work()
            except Exception:
                # A run that is written just now may be in any state; the next look
                # finds another one.
                logger.exception("the dashboard could not read")
            self._over.wait(seconds)


STATIC = Path(__file__).with_name("static")
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names of this machine under which the page may be asked for. A foreign
page whose name is made to lead here (DNS rebinding) asks under its own name."""
COLUMNS = 600
LONGEST_SEARCH = 200
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Content-Security-Policy: nothing comes from, or goes to, any other address."""
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


class BadQueryError(ValueError):
    """A parameter of the address is not what it must be."""


def make_app(onlooker: Onlooker) -> Starlette:
    """Return the application that shows this run."""

    def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    def view(request: Request) -> Response:
        start, stop = _number(request, "start"), _number(request, "stop")
        columns = int(_number(request, "columns") or COLUMNS)
        return _json(onlooker.view(start, stop, columns))

    def events(request: Request) -> Response:
        wanted = request.query_params.get("words", "")
        if len(wanted) > LONGEST_SEARCH:
            raise BadQueryError(
                f"words has {len(wanted)} characters; give {LONGEST_SEARCH} at most"
            )
        start, stop = _number(request, "start"), _number(request, "stop")
        return _json(onlooker.events(wanted, start, stop))

    return Starlette(
        routes=[
            Route("/", page),
            Route("/view", view),
            Route("/events", events),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(OnlyHere)],
        exception_handlers={BadQueryError: _bad_query},
    )


class OnlyHere:
    """Refuses requests under another name than this machine's, and ones that write;
    adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        answer: ASGIApp = self._app
        if scope["type"] == "http" and (refusal := _refusal(scope)):
            answer = refusal
        await answer(scope, receive, guarded if scope["type"] == "http" else send)


def _refusal(scope: Scope) -> Response | None:
    hosts = [value.decode("latin-1") for k, value in scope["headers"] if k == b"host"]
    if len(hosts) != 1 or _name(hosts[0]) not in HOSTS:
        return PlainTextResponse(
            f"the dashboard answers under {', '.join(HOSTS)}, not under "
            f"{', '.join(hosts) or 'no name'}; open http://localhost:PORT, "
            f"from another machine through `ssh -L PORT:localhost:PORT`\n",
            403,
        )
    if scope["method"] not in ("GET", "HEAD"):
        return PlainTextResponse("the dashboard only shows; it takes GET\n", 405)
    return None


def _name(host: str) -> str:
    """Return a Host header without its port."""
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdigit() else host.lower()


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadQueryError(f"{name} is {text[:40]!r}; give a number")
    return value


def _json(found: dict[str, Any]) -> Response:
    """Return an object as JSON; what is not finite becomes null."""
    return Response(msgspec.json.encode(found), media_type="application/json")


async def _bad_query(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)
