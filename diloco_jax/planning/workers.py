"""Work in processes of their own, which print one JSON object per line.

`{"doing", "done", "parts"}` is progress, `{"result"}` the last line, `{"config_error"}`
a refusal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diloco_jax.core.members import importable
from diloco_jax.errors import ConfigError

Progress = Callable[[str, float], None]
"""Callback (current work, share that is done)."""


def tell(line: Mapping[str, Any]) -> None:
    """Print a line, in the process that works."""
    print(json.dumps(line), flush=True)


class Workers:
    """Processes that work, one per call of `run`, from any thread."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()

    def run(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        log: Path,
        deadline_s: float,
        progress: Progress,
    ) -> tuple[Any, int]:
        """Return the result, None if there is none, and the process's exit code.

        log: takes its standard error. Raises ConfigError if the process does.
        """
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**environment, **importable()},
                text=True,
            )
        self._running.add(process)
        # A process that hangs prints nothing, so the deadline must kill it.
        killer = threading.Timer(deadline_s, process.kill)
        killer.start()
        result = None
        try:
            result = _listen(process, progress)
        finally:
            killer.cancel()
            process.kill()
            code = process.wait()
            assert process.stdout
            process.stdout.close()
            self._running.discard(process)
        return result, code

    def stop(self) -> None:
        """End all processes."""
        for process in list(self._running):
            process.kill()


def last_lines(log: Path) -> str:
    """Return the end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def _listen(process: subprocess.Popen[str], progress: Progress) -> Any:
    assert process.stdout
    for line in process.stdout:
        said = json.loads(line)
        if "config_error" in said:
            raise ConfigError(said["config_error"])
        if "result" in said:
            return said["result"]
        progress(said["doing"], said["done"] / said["parts"])
    return None
