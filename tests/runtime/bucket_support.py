"""A bucket for tests: a server here speaks Google Cloud Storage's protocol."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from urllib.parse import quote

import pytest
from runtime_support import PATIENCE_S

from diloco_jax.cluster.cluster import free_port

TIMEOUT_S = 600.0
"""Where a machine is busy, one checkpoint in this bucket takes half a minute."""
SERVER = Path(__file__).parent / "bucket_server.py"


class Bucket:
    """`gs://bucket`, and the environment in which it is found."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.environment = {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
            "GOOGLE_CLOUD_PROJECT": "any",
            "NO_GCE_CHECK": "true",
            # It is asked by a protocol that this server does not speak.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def names(self) -> list[str]:
        """Return the names of all objects."""
        with urllib.request.urlopen(
            f"{self._url}/storage/v1/b/bucket/o", timeout=PATIENCE_S
        ) as got:
            return [item["name"] for item in json.load(got).get("items", [])]

    def put(self, folder: Path, name: str) -> None:
        """Copy the files of a local folder that are not empty into the bucket's."""
        files = (p for p in folder.rglob("*") if p.is_file())
        for path in sorted(p for p in files if p.stat().st_size):
            target = quote(f"{name}/{path.relative_to(folder)}", safe="")
            request = urllib.request.Request(
                f"{self._url}/upload/storage/v1/b/bucket/o"
                f"?uploadType=media&name={target}",
                data=path.read_bytes(),
                headers={"Content-Type": "application/octet-stream"},
            )
            urllib.request.urlopen(request, timeout=PATIENCE_S).close()

    def delete(self, name: str) -> None:
        """Delete an object."""
        url = f"{self._url}/storage/v1/b/bucket/o/{quote(name, safe='')}"
        request = urllib.request.Request(url, method="DELETE")
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()

    def complete(self, folder: str) -> set[int]:
        """Numbers of the checkpoints that are complete in one, or of the coordinator's
        snapshots of the state."""
        own = [Path(n).name for n in self.names() if n.startswith(f"{folder}/state-")]
        if own:
            return {int(name.split(".")[0].split("-")[1]) for name in own}
        ends = [n for n in self.names() if n.endswith("/commit_success.txt")]
        paths = [Path(name).relative_to(folder) for name in ends if folder in name]
        return {int(path.parts[0]) for path in paths if len(path.parts) == 2}


@pytest.fixture(scope="module")
def bucket():
    port = free_port()
    command = [sys.executable, str(SERVER), str(port), str(4 * TIMEOUT_S)]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    found = Bucket(f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            found.names()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    yield found
    server.kill()
    server.wait(TIMEOUT_S)
