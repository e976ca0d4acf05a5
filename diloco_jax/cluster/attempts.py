"""How often each island was started: its incarnation, kept across crashes."""

from __future__ import annotations

import json
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.config import ConfigError
from diloco_jax.files import write_json
from diloco_jax.workdir import held

HELD_S = 60.0
"""Longer than a slow disk takes for what one that starts reads and writes."""


class Attempts:
    """Attempt numbers by island in `WORKDIR/attempts.json`, counted from 1. Several
    processes may count at a time."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def next(self, name: str) -> int:
        """The number of the attempt that begins now; on disk before it is returned."""
        lock = self.path.with_name(run_files.ATTEMPTS_LOCK)
        with held(lock, "another island that starts", HELD_S):
            counts = self._read()
            counts[name] = counts.get(name, 0) + 1
            write_json(counts, self.path)
        return counts[name]

    def _read(self) -> dict[str, int]:
        if not self.path.exists():
            return {}
        try:
            counts = json.loads(self.path.read_bytes())
            return {str(name): int(count) for name, count in counts.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.path} is not an object of attempts by island ({error}); "
                f"restore it, or give each island's next attempt as --incarnation"
            ) from error
