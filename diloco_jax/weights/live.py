"""One cycle of a run that goes on, gathered from its coordinator."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.loading import from_builtins
from diloco_jax.coordinator import kept
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import Busy, ConnectionLost

POLL_S = 0.5

Report = Callable[[str, float], None]
"""Called with what is being done, and the share that is done."""


class LiveRun:
    """A run that is served at HOST:PORT."""

    def __init__(self, client: Client, deadlines_s: float) -> None:
        """deadlines_s: seconds within which the coordinator answers, or, if it is away,
        comes back."""
        self._client, self._patience_s = client, deadlines_s

    def config(self) -> Config:
        """Return the run's config."""
        answer = self._client.config(self._patience_s)
        return from_builtins(answer, self._client.address)

    def gather(self, cycle: int, workdir: Path, report: Report) -> int:
        """Have a cycle kept, and copy its files as a workdir would have them. Return
        its number.

        No merge of the run waits for this. cycle: 0 = the next one that can be kept.
        Raises Refused for a cycle that cannot be kept.
        """
        cycle, files = self._await(cycle, report)
        folder = kept.path_of(workdir / run_files.KEPT, cycle)
        for done, name in enumerate(files):
            report(f"cycle {cycle} comes", done / len(files))
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ConfigError(f"{self._client.address} names a file {name!r}")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            self._copy(cycle, name, path)
        return cycle

    def _copy(self, cycle: int, name: str, path: Path) -> None:
        """Copy a file; begin it again where it breaks off, until that has gone on for
        the patience."""
        broke_off: float | None = None
        while True:
            try:
                with path.open("wb") as file:
                    for part in self._client.kept(cycle, name):
                        file.write(part)
                return
            except (Busy, ConnectionLost):
                now = time.monotonic()
                broke_off = now if broke_off is None else broke_off
                if now - broke_off > self._patience_s:
                    raise
                time.sleep(POLL_S)

    def _await(self, cycle: int, report: Report) -> tuple[int, list[str]]:
        """Return the cycle and the names of its files once it is kept. A cycle takes as
        long as the run's islands need for it, so this has no deadline while the
        coordinator answers."""
        heard = time.monotonic()
        while True:
            try:
                answer = self._client.keep(cycle, self._patience_s)
            except (Busy, ConnectionLost):
                if time.monotonic() - heard > self._patience_s:
                    raise
            else:
                heard = time.monotonic()
                cycle = int(answer["cycle"])
                if answer["files"]:
                    return cycle, list(map(str, answer["files"]))
                report(f"cycle {cycle} is being kept", float(answer["share"]))
            time.sleep(POLL_S)
