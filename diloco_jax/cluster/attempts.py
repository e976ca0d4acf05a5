"""How often each island was started: its incarnation, kept across crashes."""

from __future__ import annotations

import json
from pathlib import Path

from diloco_jax.config import ConfigError
from diloco_jax.loading import write_json


class Attempts:
    """Attempt numbers by island in `WORKDIR/attempts.json`, counted from 1.

    Only one process may use a file at a time.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def next(self, name: str) -> int:
        """The number of the attempt that begins now; on disk before it is returned."""
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
