"""The port for Prometheus: who gets an answer, and what that costs."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time

import pytest
from engine_support import AT, run_of

from diloco_jax.config.placement import Deadlines
from diloco_jax.coordinator import summary
from diloco_jax.coordinator.summary import Exporter
from diloco_jax.errors import ConfigError
from diloco_jax.observability.exported import Readings, Snapshot
from diloco_jax.wire import peers
from diloco_jax.wire.certificates import make_certificates, revoke
from diloco_jax.wire.tls import TlsFiles

PATIENCE_S = 20.0
NO_ANSWER = (OSError, http.client.HTTPException)


def snapshot(*islands: str) -> Snapshot:
    config, state, roster = run_of(*islands, loss=2.125, bytes_up=10**12)
    return Snapshot(
        version="1.0",
        status=summary.status(config, state, roster, seconds=8, alerts=[], now=AT + 9),
        machine=Readings(),
        alerts_raised=0,
        events_waiting=0,
        merge=None,
    )


@pytest.fixture
def serve():
    """Start an exporter; return it and its port."""
    started: list[Exporter] = []

    def serve(bind="127.0.0.1:0", *, tls=None, of=snapshot, budget_s=PATIENCE_S):
        deadlines = Deadlines(budget_s)
        exporter = Exporter(bind, of, tls=tls, insecure=False, deadlines=deadlines)
        exporter.start()
        started.append(exporter)
        return exporter, int(exporter.url.split(":")[2].split("/")[0])

    yield serve
    for exporter in started:
        exporter.close()


@pytest.fixture
def dial():
    """Connects to a port, and says a word."""
    with contextlib.ExitStack() as stack:

        def dialled(port, word=b""):
            target = "127.0.0.1", port
            made = stack.enter_context(socket.create_connection(target, PATIENCE_S))
            made.sendall(word)
            return made

        yield dialled


def get(port, path="/metrics", host=None, context=None):
    """Status and text of an answer."""
    make = http.client.HTTPSConnection if context else http.client.HTTPConnection
    extra = {"context": context} if context else {}
    connection = make("localhost", port, timeout=PATIENCE_S, **extra)
    try:
        connection.request("GET", path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_numbers_and_this_process_are_told(serve):
    exporter, port = serve()
    assert exporter.url == f"http://127.0.0.1:{port}/metrics"
    status, text = get(port)
    assert status == 200
    assert "diloco_run_merges_total 0.0" in text
    assert 'diloco_run_info{run_id="r",version="1.0"} 1.0' in text
    assert "process_cpu_seconds_total" in text
    assert get(port, "/")[0] == 404


def assert_answers(port):
    """A place is free a moment after its connection is closed."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert get(port)[0] == 200
            return
        except NO_ANSWER:
            assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:9464", 200),
        ("[::1]:9464", 200),
        ("evil.example", 403),
        ("evil.example:9464", 403),
    ],
)
def test_a_page_of_elsewhere_reads_nothing(serve, host, status):
    _, port = serve()
    assert get(port, host=host)[0] == status


def test_another_address_needs_certificates(serve):
    with pytest.raises(ConfigError, match="not loopback and no certificates"):
        serve("0.0.0.0:0")


def test_a_port_in_use_is_named(serve):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            serve(f"127.0.0.1:{port}")


def test_beyond_loopback_only_the_runs_own_get_an_answer(serve, tmp_path):
    folder = tmp_path / "certificates"
    make_certificates(folder, ["localhost"], 1, islands=["a"])
    tls = TlsFiles.load(folder, peers.COORDINATOR)
    exporter, port = serve("0.0.0.0:0", tls=tls)
    assert exporter.url.startswith("https://")
    reader = TlsFiles.load(folder, peers.READER).client_context()
    assert get(port, context=reader)[0] == 200
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.load_verify_locations(folder / "ca.pem")
    stranger.verify_flags &= ~ssl.VERIFY_X509_STRICT
    for context in (stranger, None):
        with pytest.raises(NO_ANSWER):
            get(port, context=context)
    assert get(port, context=reader)[0] == 200, "strangers hold up nobody"
    revoke(folder, peers.READER)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            get(port, context=reader)
        except NO_ANSWER:
            return
    pytest.fail("a revoked certificate still gets an answer")


@pytest.mark.parametrize("word", [b"", b"GET"], ids=["nothing", "half a request"])
def test_connections_that_say_nothing_are_bounded_and_given_up(serve, dial, word):
    _, port = serve(budget_s=0.4)
    silent = [dial(port, word) for _ in range(20)]
    names = [t.name for t in threading.enumerate() if "diloco-metrics-" in t.name]
    assert len(names) <= summary.REQUESTS_AT_ONCE + 2, "one accepts, and one watches"
    for connection in silent:
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b"", "it is closed"
    assert_answers(port)


def test_connections_that_say_nothing_shut_nobody_out(serve, dial):
    _, port = serve(budget_s=100 * PATIENCE_S)
    silent = [dial(port) for _ in range(20)]
    assert get(port)[0] == 200
    assert silent[0].recv(1) == b"", "the oldest was closed"


@pytest.mark.timing
def test_a_scrape_of_64_islands_costs_milliseconds(serve):
    crowded = snapshot(*(f"island-{n:02}" for n in range(64)))
    _, port = serve(of=lambda: crowded)
    get(port)
    began, scrapes = time.process_time(), 20
    for _ in range(scrapes):
        get(port)
    assert (time.process_time() - began) / scrapes < 0.1, "CPU seconds, client and all"
