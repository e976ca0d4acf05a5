"""A process that waits, its imports done, to take the place of one that crashes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from diloco_jax.cluster.children import kill_group, start_child

OPTION = "--spare"
"""Option of `diloco island` and `diloco coordinator` with which a process waits to be
told."""


class Spare:
    """One such process."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        """command: without the option. Raises OSError if it cannot be started."""
        with log.open("ab") as file:
            self._process = start_child(
                [*command, OPTION], environment, file, file, stdin=subprocess.PIPE
            )

    def tell(self) -> subprocess.Popen[bytes] | None:
        """Have the process take its place; return it, or None if it has ended."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            if self._process.poll() is None:
                stdin.write(b"\n")
                stdin.close()
                return self._process
        return None

    def end(self, timeout_s: float) -> None:
        """Kill the process, if it was not told, and wait until it is gone."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.close()
        kill_group(self._process)
        self._process.wait(timeout_s)
