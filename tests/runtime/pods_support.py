"""A cluster of processes: what the pods of a launch run, on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from runtime_support import PATIENCE_S

from diloco_jax.cluster.cluster import free_port
from diloco_jax.config import Config
from diloco_jax.launch import gke
from diloco_jax.launch.command import prepare_certificates
from diloco_jax.launch.spec import COORDINATOR, PERMIT, ROOT, make_spec
from diloco_jax.wire import peers

TOOL = """\
#!{python}
import sys
from diloco_jax import cli
sys.exit(cli.main())
"""


class Pods:
    """Each pod has a folder for its `/var/lib/diloco`, by its part of the run. Only
    disks outlive a pod."""

    def __init__(self, config: Config, text: Path, root: Path) -> None:
        self.root, self.text = root, text
        spec = make_spec(config, "pods.py", "gke")
        self.addresses = {COORDINATOR: f"127.0.0.1:{free_port()}"}
        self._host = spec.inside
        self.config_json = spec.config_json
        self.certificates = root / "certificates"
        hosts = (*gke.hosts(spec), "127.0.0.1")
        prepare_certificates(self.certificates, hosts, spec)
        self.running: list[subprocess.Popen[bytes]] = []
        files = gke.deployment(spec, "", "", int(time.time())).files
        self.pods = {}
        for file in files.values():
            for made in yaml.safe_load_all(file):
                name = made["metadata"]["labels"]["diloco-part"]
                if made["kind"] == "Job":
                    self.pods[name] = made["spec"]["template"]["spec"]
                if made["kind"] == "JobSet":
                    (jobs,) = made["spec"]["replicatedJobs"]
                    self.pods[name] = jobs["template"]["spec"]["template"]["spec"]
        tool = root / "bin" / "diloco"
        tool.parent.mkdir()
        tool.write_text(TOOL.format(python=sys.executable))
        tool.chmod(0o755)

    def begin(self) -> None:
        """Let the run begin on the coordinator's disk."""
        assert self.start(PERMIT).wait(PATIENCE_S) == 0

    def start(self, name: str, attempt: int = 0) -> subprocess.Popen[bytes]:
        """A new pod."""
        pod = self.pods[name]
        disk = "coordinator" if name == PERMIT else name
        folder = self.root / (disk if disk in self.addresses else f"{name}-{attempt}")
        self._mount(pod, name, folder)
        (container,) = pod["containers"]
        bash, option, script = container["command"]
        script = self._here(script, folder, name)
        env = {e["name"]: e["value"] for e in container.get("env", []) if "value" in e}
        env |= {"RESTART_ATTEMPT": str(attempt), "JAX_PLATFORMS": "cpu"}
        env["PATH"] = f"{self.root}/bin:{os.environ['PATH']}"
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [bash, option, script],
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.running.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """SIGKILL for all that is in a pod."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)

    def close(self) -> None:
        """End all pods."""
        for process in self.running:
            self.kill(process)

    def _mount(self, pod: dict, name: str, folder: Path) -> None:
        """The volumes that the pod names, where it mounts them."""
        (container,) = pod["containers"]
        for mount in container["volumeMounts"]:
            place = Path(self._here(mount["mountPath"], folder, name))
            place.mkdir(parents=True, exist_ok=True)
            if mount["name"] == "config":
                text = self._here(self.config_json, folder, name)
                (place / "config.json").write_text(text)
            if mount["name"] == "data":
                for file in self.text.iterdir():
                    (place / file.name).write_bytes(file.read_bytes())
            if mount["name"] == "certificates":
                serves = name in self.addresses
                stem = name if serves else peers.island(name).stem
                for file in ("ca.pem", f"{stem}.pem", f"{stem}.key"):
                    content = (self.certificates / file).read_bytes()
                    (place / file).unlink(missing_ok=True)
                    (place / file).write_bytes(content)
                    (place / file).chmod(0o400)

    def _here(self, text: str, folder: Path, name: str) -> str:
        text = text.replace(ROOT, str(folder))
        text = text.replace(f"{self._host}:7077", self.addresses[COORDINATOR])
        return text.replace("0.0.0.0:7077", self.addresses.get(name, "0.0.0.0:7077"))

    def log(self, name: str) -> Path:
        """Return all that pods of that name have said."""
        return self.root / f"{name}.log"

    def await_log(self, name: str, line: str, times: int = 1) -> None:
        """Return once the pods of that name have said that so many times."""
        self.await_that(lambda: self.log(name).read_text().count(line) >= times)

    def await_that(self, holds: Callable[[], bool]) -> None:
        """Return once it is so."""
        until = time.monotonic() + 2 * PATIENCE_S
        while not holds():
            assert time.monotonic() < until, self._said()
            time.sleep(0.05)

    def _said(self) -> str:
        logs = sorted(self.root.glob("*.log"))
        return "\n".join(f"---- {log.stem}\n{log.read_text()}" for log in logs)
