"""The dashboard beside a local run: a process of its own, which ends with the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from diloco_jax import run_files
from diloco_jax.cluster import commands
from diloco_jax.cluster.children import kill_group, start_child

END_S = 5.0
SEEN_S = 3.0
"""Seconds for which the page is still served after the run's end: those who watch it
see how it ended (it asks every two seconds)."""


@contextlib.contextmanager
def dashboard(workdir: Path, console: Console) -> Iterator[None]:
    """Serve the page of a run while the block runs; say where.

    It is not restarted: no run depends on it, and its log tells why it ended."""
    port = commands.free_port()
    log = workdir / run_files.LOGS / "dashboard.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        command = commands.dashboard_command(workdir, port)
        child = start_child(command, {}, output, output)
    console.print(f"dashboard: http://localhost:{port}", highlight=False)
    try:
        yield
        time.sleep(SEEN_S)
    finally:
        kill_group(child)
        child.wait(END_S)
