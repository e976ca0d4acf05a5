"""The metadata server of a cloud machine: what the cloud says about this instance."""

from __future__ import annotations

import os
import urllib.request

HOST = "metadata.google.internal"
ANSWER_S = 5.0
"""Longest wait for an answer, in seconds."""


def ask(path: str, host: str = "", waits_s: float = 0.0) -> tuple[str, str]:
    """Return the value at `computeMetadata/v1/instance/PATH`, and its tag.

    Args:
      host: HOST or HOST:PORT of the server; empty = GCE_METADATA_HOST, or the usual
        one.
      waits_s: seconds for which the server may hold the answer back.

    Raises:
      OSError: no server, or no such value.
      ValueError: another kind of server.
    """
    host = host or os.environ.get("GCE_METADATA_HOST", HOST)
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{path}",
        headers={"Metadata-Flavor": "Google"},
    )
    # Never by way of a proxy: the server is this machine's own.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_S + waits_s) as answer:
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise ValueError("it answers, but is no metadata server")
        return answer.read().decode(errors="replace"), answer.headers.get("ETag", "")
