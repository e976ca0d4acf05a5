"""A server to which alerts are posted."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple


class Hook(NamedTuple):
    """The URL of the server, and what was posted there."""

    url: str
    posted: list[dict[str, Any]]


@contextlib.contextmanager
def webhook() -> Iterator[Hook]:
    """Serve until the block ends."""
    posted: list[dict[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            posted.append(json.loads(self.rfile.read(length)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Hook(f"http://127.0.0.1:{server.server_port}/hook", posted)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
