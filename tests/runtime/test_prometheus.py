"""A real Prometheus that scrapes a live run has data for every query of the dashboard,
and takes the rules and the configuration of docs/prometheus.md."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import socket
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

import pytest
import yaml
from runtime_support import make_config, placed, with_run

from diloco_jax import LocalCluster, run_files
from diloco_jax.config import IslandConfig
from diloco_jax.coordinator.summary import Exporter
from diloco_jax.observability.exported import Readings, Snapshot
from diloco_jax.wire import peers
from diloco_jax.wire.certificates import make_certificates
from diloco_jax.wire.tls import TlsFiles

sys.path.append(str(Path(__file__).parents[1] / "observability"))

from grafana_support import missing, queries

pytestmark = pytest.mark.dist

PAGE = Path(__file__).parents[2] / "docs" / "prometheus.md"
TIMEOUT_S = 240.0
POLL_S = 0.5


def find(name: str) -> str:
    """Path of a program of Debian's package prometheus."""
    return shutil.which(name) or missing(name, "bash .ci/prometheus")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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


def test_every_query_of_the_dashboard_finds_something(text, tmp_path):
    find("prometheus")
    config = with_run(make_config(text, quorum=1), total_tokens=10**9)
    islands = {
        name: IslandConfig(batch_size=2, step_seconds=0.05) for name in ("a", "b")
    }
    config = placed(
        dataclasses.replace(config, islands=islands),
        metrics_bind="127.0.0.1:0",
        evaluate_every_steps=5,
        watch_every=1,
        faults=("a@30:kill",),
        restart_delay_s=0.1,
    )
    with contextlib.ExitStack() as held:
        cluster = held.enter_context(LocalCluster(config))

        def is_going(status: dict[str, Any]) -> bool:
            a = status["islands"].get("a", {})
            again = a.get("incarnation") == 2 and a["state"] == "training"
            told = status.get("merged_model") and status["tokens_lost"]
            return bool(again and told and len(status["islands"]) == 2)

        cluster.until(is_going, TIMEOUT_S)
        url = (cluster.workdir / run_files.METRICS_ADDRESS).read_text()
        at = urllib.parse.urlsplit(url).netloc
        live = {"job_name": "diloco", "static_configs": [{"targets": [at]}]}
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
