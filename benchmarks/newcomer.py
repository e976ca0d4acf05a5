"""A newcomer's path: from a bare venv to the dashboard of a run that lost an island.

Question: with nothing but Python and the wheel, how long does it take until the
dashboard of the quickstart answers, until it shows that an island was killed, and until
the run is over? The two commands are `pip install diloco_jax-*.whl` and `diloco run
quickstart --dashboard`.

The venv is new, pip has no cache, and nothing was compiled before. The wheel is built
from this checkout first, which does not count. How long the download takes is a matter
of the network: what pip installed is given in megabytes.

Bounds: ten minutes from the first command until the killed island is on the dashboard.

Command: `python -m benchmarks.newcomer`. Cost: about seven minutes. The figures belong
on docs/results/quickstart.md; this script writes docs/results/raw/newcomer.json alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import support
from machine import disk_bytes, machine_facts

from diloco_jax.files import write_json

ROOT = Path(__file__).resolve().parents[1]
WITHIN_S = 600.0
"""Until the dashboard shows the kill; the run's own deadline is twice that."""
VICTIM = "v5p-b"
"""The island that configs/quickstart.py kills."""
POLL_S = 0.2


def main() -> int:
    """Run it; return 1 if a bound is broken."""
    parser = support.parser(__doc__)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        found = measure(Path(folder))
    checks = [
        support.at_most(
            "seconds from the first command to the kill on the dashboard",
            found["killed_seconds"],
            WITHIN_S,
            ".0f",
        )
    ]
    told = {"checks": [dataclasses.asdict(check) for check in checks], **found}
    write_json({**machine_facts(), **told}, options.out / "raw" / "newcomer.json")
    print(support.markdown_table([found]), file=sys.stderr)
    return 0 if all(check.holds for check in checks) else 1


def measure(folder: Path) -> dict[str, Any]:
    """Return seconds since the first command, by what was reached."""
    build = [sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = (folder / "dist").glob("*.whl")
    environment = _bare(folder)
    load = os.getloadavg()[0]
    began = time.monotonic()
    bare = folder / "bare"
    subprocess.run([_python(), "-m", "venv", str(bare)], check=True, env=environment)
    pip = [str(bare / "bin" / "pip"), "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, str(wheel)], check=True, env=environment)
    installed = time.monotonic() - began
    workdir = folder / "run"
    command = [str(bare / "bin" / "diloco"), "run", "quickstart", "--dashboard"]
    run = subprocess.Popen(
        [*command, "--workdir", str(workdir)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = _Said(run)
    try:
        deadline = began + WITHIN_S
        address = said.await_line(r"dashboard: (http://localhost:\d+)", deadline)
        _await(lambda: bool(asked(f"{address}/view")), run, deadline, "the page")
        answered = time.monotonic() - began
        search = f"{address}/events?words={quote(f'{VICTIM} #1 ended')}"
        _await(lambda: bool(shown(search)), run, deadline, "the kill on the page")
        killed = time.monotonic() - began
        run.wait(2 * WITHIN_S)
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
            run.wait(60)
    if run.returncode:
        raise support.RunError(f"exit code {run.returncode}:\n{said.tail()}")
    summary = json.loads((workdir / "summary.json").read_bytes())
    return {
        "installed_seconds": round(installed, 1),
        "dashboard_seconds": round(answered, 1),
        "killed_seconds": round(killed, 1),
        "over_seconds": round(time.monotonic() - began, 1),
        "load_before": round(load, 2),
        "installed_megabytes": round(disk_bytes(bare, ()) / 1e6),
        "victim_joins": summary["islands"][VICTIM]["joins"],
        "tokens_lost": sum(summary["tokens_lost"].values()),
        "eval_loss": summary["eval_loss"],
    }


class _Said:
    """Output of a process, read by a thread so that it never waits for us."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._lines: list[str] = []
        self._process = process
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self._lines.extend(self._process.stdout)

    def await_line(self, pattern: str, deadline: float) -> str:
        """Return the group of the first line that matches."""

        def found() -> list[str]:
            return [m[1] for line in self._lines if (m := re.search(pattern, line))]

        _await(lambda: bool(found()), self._process, deadline, repr(pattern))
        return found()[0]

    def tail(self) -> str:
        """Return the last lines."""
        return "".join(self._lines[-15:])


def asked(address: str) -> bytes:
    """Return what is served there; nothing while nobody answers."""
    try:
        with urlopen(address, timeout=5) as answer:
            served: bytes = answer.read()
            return served
    except (URLError, TimeoutError, ConnectionError):
        return b""


def shown(address: str) -> list[Any]:
    """Return the events that a search on the page finds."""
    found = json.loads(asked(address) or b"{}")
    return list(found.get("events", ()))


def _await(
    holds: Callable[[], bool],
    run: subprocess.Popen[str],
    deadline: float,
    what: str,
) -> None:
    while not holds():
        if run.poll() is not None:
            raise support.RunError(f"the run ended ({run.returncode}) before {what}")
        if time.monotonic() >= deadline:
            raise support.RunError(f"no {what} within {WITHIN_S:g} s")
        time.sleep(POLL_S)


def _bare(folder: Path) -> dict[str, str]:
    """Return an environment that knows nothing of this checkout, and has no caches."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX"))}
    homes = {
        f"XDG_{kind}_HOME": str(folder / kind.lower()) for kind in ("CACHE", "STATE")
    }
    return {**kept, **homes}


def _python() -> str:
    """Return the interpreter on which this one's venv stands."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(Path(sys.base_prefix) / "bin" / name)


if __name__ == "__main__":
    support.script(main)
