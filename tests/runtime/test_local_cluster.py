"""A run from Python: its processes can be watched, traced, killed and paused, and all
end. A real Prometheus that scrapes it has data for every query of the dashboard, and
takes the rules and the configuration of docs/prometheus.md."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from runtime_support import client, make_config, placed, with_run

from diloco_jax import LocalCluster, cli, run_files
from diloco_jax.cluster.cluster import LocalClusterError, LocalProcess, free_port
from diloco_jax.config import Config, ConfigError, IslandConfig
from diloco_jax.config.placement import Deadlines
from diloco_jax.coordinator.summary import Exporter
from diloco_jax.observability.exported import Readings, Snapshot
from diloco_jax.wire import peers
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.errors import SecurityError
from diloco_jax.wire.tls import TlsFiles

sys.path.append(str(Path(__file__).parents[1] / "observability"))

from grafana_support import missing, queries

pytestmark = pytest.mark.dist

PAGE = Path(__file__).parents[2] / "docs" / "prometheus.md"
TIMEOUT_S = 120.0


def test_a_run_that_gathers_anchors_is_ended_too(monkeypatch):
    """Its islands have made no step, and their status has no seconds of one."""
    offering = {"a": {"state": "offering", "incarnation": 1}}
    with LocalCluster(Config(islands={"a": IslandConfig()})) as cluster:
        cluster.close()
        cluster._launcher = subprocess.Popen(["sleep", "600"])
        status = {"phase": "gathering", "islands": offering}
        monkeypatch.setattr(cluster, "status", lambda: status)
    assert cluster.ended


def test_a_folder_that_has_a_run_stays_as_it_is(tmp_path):
    """One that is a run's workdir, and one in which a cluster had one."""
    config = Config(islands={"a": IslandConfig()})
    for file in (tmp_path / run_files.TAPE, tmp_path / "run" / run_files.CONFIG):
        file.parent.mkdir(exist_ok=True)
        file.touch()
        cluster = LocalCluster(config, tmp_path)
        with pytest.raises(ConfigError, match=f"holds a run already .{file}"):
            cluster.start()
        assert not cluster.log.exists()
        file.unlink()


def test_a_process_that_is_gone_gets_no_signal(tmp_path):
    """Its number may be another process's now."""
    process = LocalProcess("a", tmp_path)
    with subprocess.Popen(["sleep", "60"]) as other:
        (tmp_path / run_files.PROCESSES).write_text(json.dumps({"a": [other.pid]}))
        with pytest.raises(LocalClusterError, match="a has no process for host 0"):
            process.kill()
        assert other.poll() is None
        other.kill()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.fixture(scope="module")
def running(text):
    """A run that goes on, and what ends it."""
    config = with_run(make_config(text, quorum=1), total_tokens=10**9)
    islands = {
        name: IslandConfig(batch_size=2, step_seconds=0.1) for name in ("a", "b")
    }
    config = placed(
        dataclasses.replace(config, islands=islands),
        restart_delay_s=0.1,
        metrics_bind="127.0.0.1:0",
        evaluate_every_steps=5,
        watch_every=1,
    )
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(config))
        cluster.until(lambda s: trains(s, "a", 1) and trains(s, "b", 1), TIMEOUT_S)
        yield cluster, stack


def trains(status, name, incarnation):
    island = status["islands"].get(name, {})
    return island.get("incarnation") == incarnation and island["steps"] > 5


def kill(cluster, name):
    """Kill an island, and wait until its next incarnation trains."""
    life = cluster.status()["islands"][name]["incarnation"]
    cluster.islands[name].kill()
    cluster.until(lambda s: trains(s, name, life + 1), TIMEOUT_S)


def test_only_its_user_may_read_it_and_whoever_has_its_keys(running):
    cluster, _ = running
    workdir = cluster.workdir
    with (
        client((workdir / run_files.ADDRESS).read_text()) as stranger,
        pytest.raises(SecurityError, match="has no certificates"),
    ):
        stranger.status(TIMEOUT_S)
    made = [path for path in workdir.rglob("*") if not path.is_symlink()]
    assert {"keys", "logs", "tape.jsonl"} <= {path.name for path in made}
    assert [p for p in (workdir, *made) if p.stat().st_mode & 0o077] == []


def test_an_operator_gets_a_trace_of_steps(running, capsys):
    cluster, _ = running
    where = ("--coordinator", str(cluster.workdir))
    assert cli.main(["profile", "a", "--steps", "3", *where]) == 0
    told = capsys.readouterr().err
    assert f"its next 3 steps into {run_files.PROFILES}/a-STEP" in told
    folder = cluster.workdir / run_files.PROFILES
    log = cluster.workdir / run_files.LOGS / "a.log"
    cluster.until(lambda s: "trace of 3 steps is in" in log.read_text(), TIMEOUT_S)
    (file,) = folder.rglob("*.xplane.pb")
    (name,) = (path.name for path in folder.iterdir())
    traced = jax.profiler.ProfileData.from_file(str(file))
    numbers = {
        int(dict(event.stats)["step_num"])
        for plane in traced.planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    }
    assert len([number for number in numbers if number >= int(name[2:])]) >= 3
    assert cli.main(["profile", "c", *where]) == 3
    assert "no island 'c' was ever in the run" in capsys.readouterr().err


def test_processes_can_be_killed_and_paused(running, capsys):
    cluster, _ = running
    (first,) = cluster.islands["b"].pids
    kill(cluster, "b")
    assert not is_alive(first)
    (a,) = cluster.islands["a"].pids
    cluster.islands["a"].pause()
    cluster.until(lambda s: s["islands"]["a"]["state"] == "absent", TIMEOUT_S)
    assert state_of(a) == "T"
    assert cli.main(["profile", "a", "--coordinator", str(cluster.workdir)]) == 3
    assert "'a' is absent" in capsys.readouterr().err
    before = cluster.status()["islands"]["a"]["steps"]
    cluster.islands["a"].resume()
    cluster.until(lambda s: s["islands"]["a"]["steps"] > before, TIMEOUT_S)
    with pytest.raises(LocalClusterError, match="no process for host 1"):
        cluster.islands["a"].kill(host=1)
    with pytest.raises(LocalClusterError, match=r"not meet the condition in 0\.1 s"):
        cluster.until(lambda status: False, 0.1)


def test_every_query_of_the_dashboard_finds_something(running, tmp_path):
    """Of a run in which an island was killed."""
    find("prometheus")
    cluster, _ = running
    if not cluster.status()["tokens_lost"]:  # No test has killed one before.
        kill(cluster, "b")
    cluster.until(lambda s: s.get("merged_model") and s["tokens_lost"], TIMEOUT_S)
    url = (cluster.workdir / run_files.METRICS_ADDRESS).read_text()
    at = urllib.parse.urlsplit(url).netloc
    live = {"job_name": "diloco", "static_configs": [{"targets": [at]}]}
    with contextlib.ExitStack() as held:
        other = held.enter_context(secured(tmp_path / "certificates"))
        prometheus = Prometheus(tmp_path, [live, other])
        held.callback(prometheus.close)
        # What Grafana puts in for its variables.
        wanted = {
            asked: asked.expr.replace("$instance", at).replace("$__rate_interval", "9s")
            for asked in queries()
            if "diloco_worker_" not in asked.expr  # Workers are at other addresses.
        }
        deadline = time.monotonic() + TIMEOUT_S
        while wanted and time.monotonic() < deadline:
            wanted = {a: e for a, e in wanted.items() if not prometheus.query(e)}
            time.sleep(POLL_S)
        assert wanted == {}
        assert prometheus.query('diloco_run_info{job="secured"}'), "by TLS"


def test_no_process_outlives_it(running):
    cluster, stack = running
    pids = [
        pid
        for process in (cluster.coordinator, *cluster.islands.values())
        for pid in process.pids
    ]
    assert len(pids) == 3
    stack.close()
    assert not any(is_alive(pid) for pid in pids)
    assert not cluster.workdir.exists()


def test_a_run_that_cannot_start_says_why(text, tmp_path):
    config = placed(make_config(text), certificates=str(tmp_path / "none"))
    with (
        LocalCluster(config, tmp_path / "kept") as cluster,
        pytest.raises(LocalClusterError, match="exit code 2"),
    ):
        cluster.wait(TIMEOUT_S)
    assert "none" in cluster.log.read_text()


# ---- Prometheus ------------------------------------------------------------------

POLL_S = 0.5


def find(name: str) -> str:
    """Path of a program of Debian's package prometheus."""
    return shutil.which(name) or missing(name, "bash .ci/prometheus")


class Prometheus:
    """A server that scrapes these jobs every second."""

    def __init__(self, folder: Path, jobs: list[dict[str, Any]]) -> None:
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
            "scrape_configs": jobs,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._at = f"127.0.0.1:{free_port()}"
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    find("prometheus"),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address={self._at}",
                ],
                stdout=log,
                stderr=log,
            )

    def query(self, expr: str) -> list[Any]:
        """Return what an instant query finds; nothing until the server is up."""
        ask = urllib.parse.urlencode({"query": expr})
        try:
            url = f"http://{self._at}/api/v1/query?{ask}"
            with urllib.request.urlopen(url, timeout=10) as answer:
                found: list[Any] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as refused:
            if refused.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise  # The query is none.
            return []
        except OSError:
            self._require_alive()
            return []
        return found

    def _require_alive(self) -> None:
        assert self._process.poll() is None, self._log.read_text()[-3000:]

    def close(self) -> None:
        self._process.kill()
        self._process.wait(TIMEOUT_S)


@contextlib.contextmanager
def secured(folder: Path) -> Iterator[dict[str, Any]]:
    """A port beyond loopback; the job that scrapes it with a reader's certificate."""
    make_certificates(folder, ["localhost"], 1)
    exporter = Exporter(
        "0.0.0.0:0",
        lambda: Snapshot("1", STATUS, Readings(), 0, 0, None),
        tls=TlsFiles.load(folder, peers.COORDINATOR),
        insecure=False,
        deadlines=Deadlines(TIMEOUT_S),
    )
    exporter.start()
    port = urllib.parse.urlsplit(exporter.url).port
    try:
        yield {
            "job_name": "secured",
            "scheme": "https",
            "static_configs": [{"targets": [f"localhost:{port}"]}],
            "tls_config": {
                "ca_file": str(folder / "ca.pem"),
                "cert_file": str(folder / "reader.pem"),
                "key_file": str(folder / "reader.key"),
            },
        }
    finally:
        exporter.close()


STATUS = {
    "run_id": "secured",
    "phase": "running",
    "term": 1,
    "seconds": 1.0,
    "tokens": 1,
    "total_tokens": 2,
    "tokens_merged": 0,
    "tokens_lost": {},
    "goodput": 0.0,
    "merges": 0,
    "merged_model": None,
    "islands": {},
}


@pytest.mark.parametrize(
    ("key", "check"), [("groups", "rules"), ("scrape_configs", "config")]
)
def test_the_page_has_what_prometheus_takes(key, check, tmp_path):
    promtool = find("promtool")
    blocks = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (block,) = [b for b in blocks if b.startswith(f"{key}:")]
    make_certificates(tmp_path / "certs", ["localhost"], 1)
    (tmp_path / "page.yml").write_text(block)
    done = subprocess.run(
        [promtool, "check", check, "page.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
