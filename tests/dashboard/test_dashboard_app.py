"""The server: this machine alone, under its own names, and only to read."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from made_runs import BEGIN, MadeRun, write_run
from rich.console import Console

from diloco_jax import run_files
from diloco_jax.cluster import cluster
from diloco_jax.cluster.cluster import DILOCO
from diloco_jax.config import ConfigError, Placement
from diloco_jax.dashboard import app
from diloco_jax.dashboard.app import STATIC, RunReader
from diloco_jax.dashboard.command import listen
from diloco_jax.wire.errors import ConnectionLost

START_S = 30.0
ECHARTS = "61f13280aba3161f77fc801bf5f9c786f55f10432153a0683fc5cc0700b013d5"
"""SHA-256 of dist/echarts.common.min.js of echarts 6.1.0."""


def start(target: Path | str) -> tuple[subprocess.Popen[str], int]:
    """Start the command; return it and its port."""
    process = subprocess.Popen(
        [*DILOCO, "dashboard", str(target), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = process.stderr.readline()
    found = re.fullmatch(r"http://localhost:(\d+) shows .*\n", said)
    assert found, said + process.stderr.read()
    return process, int(found[1])


def stop(process: subprocess.Popen[str]) -> None:
    """End the command as Ctrl-C does; it says nothing more."""
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=START_S)
    assert (process.returncode, said) == (0, "")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The port of a dashboard of a made run."""
    workdir = tmp_path_factory.mktemp("run")
    process, port = start(write_run(MadeRun(islands=3, seconds=60), workdir))
    yield port
    stop(process)


@pytest.fixture
def ask(served):
    def ask(path="/", method="GET", host=None):
        connection = http.client.HTTPConnection("127.0.0.1", served, timeout=START_S)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", f"localhost:{served}" if host is None else host)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer, body

    return ask


@pytest.mark.dist
@pytest.mark.parametrize("path", ["/", "/view", "/events", "/static/main.js", "/none"])
def test_every_answer_forbids_to_fetch_from_elsewhere(ask, path):
    answer, _ = ask(path)
    assert answer.status == (404 if path == "/none" else 200)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert not re.search(r"https?:|\*|unsafe", policy)
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.dist
@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example", "", "127.0.0.2"]
)
@pytest.mark.parametrize("path", ["/", "/view", "/static/main.js"])
def test_other_names_are_refused(ask, path, host):
    answer, body = ask(path, host=host)
    assert answer.status == 403
    assert b"answers under" in body


@pytest.mark.dist
@pytest.mark.parametrize("host", ["127.0.0.1:1", "LOCALHOST", "[::1]:7", "localhost:9"])
def test_names_of_this_machine_are_served_through_any_port(ask, host):
    assert ask("/view", host=host)[0].status == 200


@pytest.mark.dist
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_is_written(ask, method):
    assert ask("/view", method)[0].status == 405


@pytest.mark.dist
@pytest.mark.parametrize("query", ["start=x", "stop=nan", "columns=1e999"])
def test_a_parameter_that_is_no_number_is_named(ask, query):
    answer, body = ask(f"/view?{query}")
    assert answer.status == 400
    assert body.decode().startswith(query.split("=")[0])
    assert ask(f"/events?words={'x' * 201}")[0].status == 400


@pytest.mark.dist
def test_no_file_outside_the_page_is_served(ask):
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd"):
        assert ask(path)[0].status == 404


@pytest.mark.dist
def test_only_loopback_is_bound(served):
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    bound = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    here = [place for place in bound if place.endswith(f":{served:04X}")]
    assert here == [f"0100007F:{served:04X}"]


@pytest.mark.dist
def test_a_window_of_the_run_comes_as_json(ask):
    _, body = ask(f"/view?start={BEGIN + 30}&stop={BEGIN + 50}&columns=100")
    found = json.loads(body)
    assert found["window"] == [BEGIN + 30, BEGIN + 50]
    assert found["status"]["phase"] == "done"
    assert len(found["lanes"]) == 4
    _, body = ask("/events?words=joins")
    assert len(json.loads(body)["events"]) == 3


@pytest.mark.dist
def test_a_local_run_has_it_beside_and_ends_it(tmp_path):
    workdir = write_run(MadeRun(islands=2, seconds=3), tmp_path / "run")
    said = io.StringIO()
    with cluster.dashboard(workdir, Console(file=said, width=200)):
        (port,) = re.findall(r"dashboard: http://localhost:(\d+)", said.getvalue())
        assert answered(int(port)) == 200
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)), START_S).close()
    assert "shows" in (workdir / run_files.LOGS / "dashboard.log").read_text()


def answered(port: int) -> int:
    """The status of the first answer, once there is one."""
    deadline = time.monotonic() + START_S
    while True:
        connection = http.client.HTTPConnection("localhost", port, timeout=START_S)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        finally:
            connection.close()


def test_a_run_that_is_written_is_followed(tmp_path):
    workdir = write_run(MadeRun(islands=2, seconds=40), tmp_path / "run", over=False)
    tape = workdir / run_files.TAPE
    whole = tape.read_bytes()
    half = whole.index(b"\n", len(whole) // 2) + 1
    tape.write_bytes(whole[:half])
    reader = RunReader(workdir, Placement())
    reader.read()
    before = reader.view(None, None, 100)
    with tape.open("ab") as file:
        file.write(whole[half:])
    assert reader.view(None, None, 100)["read"] == 1.0, "that is news, and no backlog"
    reader.read()
    after = reader.view(None, None, 100)
    assert before["merges"]
    assert len(after["merges"]) > len(before["merges"])
    assert after["read"] == 1.0


def test_a_run_that_has_not_begun_is_waited_for(tmp_path):
    workdir = write_run(MadeRun(islands=2, seconds=3), tmp_path / "run", over=False)
    for name in (run_files.TAPE, run_files.METRICS, run_files.FACTS):
        (workdir / name).unlink()
    reader = RunReader(workdir, Placement())
    reader.read()
    reader.ask()
    found = reader.view(None, None, 100)
    assert found["lanes"][0]["name"] == "coordinator"
    assert "not up yet" in found["status"]["unreachable"]


def test_a_coordinator_that_does_not_answer_is_said(tmp_path, monkeypatch):
    def lost(*_):
        raise ConnectionLost("host:7000 is not there")

    workdir = write_run(MadeRun(islands=2, seconds=3), tmp_path / "run", over=False)
    monkeypatch.setattr(app, "read_status", lost)
    reader = RunReader(workdir, Placement())
    reader.ask()
    found = reader.view(None, None, 100)
    assert found["status"] == {"unreachable": "host:7000 is not there"}
    assert found["health"]["state"] == "down"


def test_a_port_that_is_taken_or_none_is_named():
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: .* give another"):
            listen(port)
    with pytest.raises(ConfigError, match="--port is 70000; give one from 0"):
        listen(70_000)


def test_echarts_is_the_one_that_was_published_and_has_its_licence():
    assert (
        hashlib.sha256((STATIC / "echarts.min.js").read_bytes()).hexdigest() == ECHARTS
    )
    licence = (STATIC / "echarts.LICENSE.txt").read_text()
    assert "Apache License" in licence
    assert "Apache ECharts" in licence


def test_the_page_names_no_other_address():
    for file in STATIC.iterdir():
        if not file.name.startswith("echarts"):
            assert not re.search(r"https?://|//[a-z]+\.", file.read_text()), file.name
