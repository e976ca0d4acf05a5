"""Islands that vanish: people hear of it where they are, and of their return."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_support import (
    PATIENCE_S,
    await_state,
    client,
    coordinator,
    hello,
    make_config,
    placed,
    report,
)

from diloco_jax.observability import alarm

LEASE_S = 1.0


class Told:
    """Texts that were posted to a URL."""

    def __init__(self) -> None:
        told = self._texts = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posted = self.rfile.read(int(self.headers["Content-Length"]))
                told.extend(json.loads(posted)["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                """Nothing."""

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/"

    def of(self, text: str) -> str:
        """The first alert with this text, once it has come."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := [told for told in self._texts if text in told]):
            assert time.monotonic() < deadline, self._texts
            time.sleep(0.02)
        assert len(found) == 1, found
        return found[0]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setattr(alarm, "EVERY_S", 0.0)
    monkeypatch.setattr(alarm, "LOOK_S", 0.05)
    told = Told()
    thread = threading.Thread(target=told.server.serve_forever, daemon=True)
    thread.start()
    yield told
    told.server.shutdown()
    told.server.server_close()
    thread.join(PATIENCE_S)


def test_who_vanished_that_nobody_is_left_and_who_is_back_reach_the_url(
    text: Path, tmp_path: Path, told: Told
) -> None:
    config = placed(make_config(text), time_budget_s=LEASE_S, alert_url=told.url)
    with coordinator(config, tmp_path) as service, client(service.address) as a:
        stream = a.open_control(hello(config, "a"))
        with client(service.address) as b:
            b.open_control(hello(config, "b")).send(report(1))
            stream.send(report(1))
            await_state(
                service,
                lambda state: (
                    [i.phase for i in state.islands.values()] == ["training"] * 2
                ),
            )
        while not told._texts:
            stream.send(report(1))
            time.sleep(LEASE_S / 20)
        assert "1 of 2 islands are left" in told.of("island 'b' is absent")
        stream.cancel()
        assert "'a', 'b'" in told.of("no island is left")
        a.open_control(hello(config, "a"))
        assert "1 of 2 islands are left" in told.of("island 'a' is back: for ")
