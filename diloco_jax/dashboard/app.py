"""The page and its data over HTTP: to this machine alone, and only to read.

Threads keep a timeline and a status up to date while the page is served.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import operator
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from diloco_jax import run_files
from diloco_jax.cluster.status import read_status
from diloco_jax.config import Config, DataConfig, Placement
from diloco_jax.config.loading import read_config_json
from diloco_jax.dashboard.timeline import Timeline
from diloco_jax.dashboard.view import Window, find_events, view
from diloco_jax.data.tokenizers import VOCAB_SIZE
from diloco_jax.errors import ConfigError
from diloco_jax.models.flops import sequence_flops
from diloco_jax.observability.measures import health_of
from diloco_jax.observability.tape import NewLines, nbytes
from diloco_jax.wire.errors import WireError
from diloco_jax.workdir import holds_run, read_facts, require_format

logger = logging.getLogger(__name__)

Take = Callable[[Mapping[str, Any]], None]

BITS_PER_NAT = 1 / math.log(2)
LINES_EVERY_S = 1.0
STATUS_EVERY_S = 2.0
AT_ONCE = 5_000
"""Lines taken under one hold of the lock: the page is served between them."""
STOP_S = 5.0
SHORTEST_S = 0.01
EVENTS_SHOWN = 200


class RunReader:
    """The run of a workdir, going on or over, for any number of readers.

    A context manager: its threads run inside the block. They read the tape, metrics and
    strikes of chaos while their writers are at work, and write nothing. However many
    pages are open, the coordinator is asked once every `STATUS_EVERY_S`.
    """

    def __init__(
        self,
        workdir: Path,
        placement: Placement,
        link_bytes_per_s: float = 0.0,
    ) -> None:
        """placement: of the certificates with which the coordinator is asked.
        link_bytes_per_s: of each island's link, each way; 0 = not known.

        Raises ConfigError if the folder holds no run of this format, and none is being
        started there.
        """
        require_format(workdir)
        self._workdir, self._placement = workdir, placement
        self._link_bytes_per_s = link_bytes_per_s
        self._config: Config = read_config_json(workdir / run_files.CONFIG)
        self._timeline = Timeline()
        self._sources = {
            NewLines(workdir / run_files.TAPE): self._timeline.tape,
            NewLines(workdir / run_files.METRICS): self._timeline.metrics,
            NewLines(workdir / run_files.CHAOS): self._strike,
        }
        self._there = 0
        """Bytes to be read as the last look at them began: of a run that goes on there
        is always something newer."""
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._status: dict[str, Any] = {}
        self._threads = [
            threading.Thread(target=self._every, args=pair, daemon=True)
            for pair in ((STATUS_EVERY_S, self.ask), (LINES_EVERY_S, self.read))
        ]

    def __enter__(self) -> RunReader:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(STOP_S)

    def ask(self) -> None:
        """Read the status once: the coordinator's, or the summary that it left."""
        try:
            self._status = read_status(str(self._workdir), self._placement)
        except (WireError, ConfigError, OSError) as error:
            self._status = {"unreachable": str(error)}

    def read(self) -> None:
        """Take all lines that are new, in the order of time."""
        self._there = sum(nbytes(lines.path) for lines in self._sources)
        sources = (_dated(*source) for source in self._sources.items())
        lines = heapq.merge(*sources, key=operator.itemgetter(0))
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
        status, facts = self._status, self._facts()
        whole = start is None and stop is None
        goodput = status.get("goodput") if whole else None
        with self._lock:
            window = self._window(start, stop, columns)
            shown = view(self._timeline, window, facts["flops_per_token"], goodput)
        read = sum(lines.read_bytes for lines in self._sources)
        return {
            **shown,
            "now": time.time(),
            "run": {**facts, "link_bytes_per_s": self._link_bytes_per_s},
            "health": health_of(status),
            "read": round(min(1.0, read / self._there), 3) if self._there else 1.0,
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

    def _facts(self) -> dict[str, Any]:
        """Return what does not change: the run's name and islands, how its loss becomes
        bits per byte, and its tokens FLOPs."""
        run = self._config.run
        begun = read_facts(self._workdir) if holds_run(self._workdir) else None
        own = bool(run.data.tokenizer or run.data.factory)
        of_bytes = not own and run.model.vocab_size == VOCAB_SIZE
        # No formula is known of a model of the user's own, and of adapters.
        known = not (run.model.factory or run.model.lora_rank)
        flops = sequence_flops(run) if known else None
        return {
            "name": self._workdir.resolve().name,
            "run_id": begun.run_id if begun else "",
            "total_tokens": run.total_tokens,
            "expected": sorted(self._config.islands),
            "data": _data_of(run.data),
            "bits_per_nat": BITS_PER_NAT if of_bytes else None,
            "flops_per_token": flops / run.sequence_length if flops else None,
        }

    def _strike(self, line: Mapping[str, Any]) -> None:
        missed = line.get("missed")
        gone = f"; not running: {', '.join(missed)}" if missed else ""
        text = f"diloco chaos strikes: {line.get('strike')}{gone}"
        who = ",".join(line.get("who", ()))
        self._timeline.event(line["time"], "strike", who, text)

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


def _data_of(data: DataConfig) -> str:
    """Name what a run trains on, in a few words."""
    if data.factory:
        return f"data of {data.factory}"
    names = [Path(path).name or path for path in data.paths]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more or "the sources of Python's standard library"


def _dated(lines: NewLines, take: Take) -> Iterator[tuple[float, Take, dict[str, Any]]]:
    """Yield the new lines that have a time, each with it and with what takes it."""
    for line in lines:
        if isinstance(line.get("time"), (int, float)):
            yield line["time"], take, line


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


def make_app(reader: RunReader) -> Starlette:
    """Return the application that shows this run."""

    def answer(found: dict[str, Any]) -> Response:
        # What is not finite becomes null.
        return Response(msgspec.json.encode(found), media_type="application/json")

    def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    def view(request: Request) -> Response:
        start, stop = _number(request, "start"), _number(request, "stop")
        columns = int(_number(request, "columns") or COLUMNS)
        return answer(reader.view(start, stop, columns))

    def events(request: Request) -> Response:
        wanted = request.query_params.get("words", "")
        if len(wanted) > LONGEST_SEARCH:
            raise HTTPException(
                400,
                f"words has {len(wanted)} characters; give {LONGEST_SEARCH} at most",
            )
        start, stop = _number(request, "start"), _number(request, "stop")
        return answer(reader.events(wanted, start, stop))

    return Starlette(
        routes=[
            Route("/", page),
            Route("/view", view),
            Route("/events", events),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=guarded)],
    )


async def guarded(request: Request, go_on: RequestResponseEndpoint) -> Response:
    """Refuse a request under another name than this machine's; add `HEADERS` to every
    answer."""
    hosts = request.headers.getlist("host")
    if len(hosts) == 1 and re.sub(r":\d+$", "", hosts[0].lower()) in HOSTS:
        answer = await go_on(request)
    else:
        answer = PlainTextResponse(
            f"the dashboard answers under {', '.join(HOSTS)}, not under "
            f"{', '.join(hosts) or 'no name'}; open http://localhost:PORT, "
            f"from another machine through `ssh -L PORT:localhost:PORT`\n",
            403,
        )
    answer.headers.update(HEADERS)
    return answer


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, f"{name} is {text[:40]!r}; give a number")
    return value
