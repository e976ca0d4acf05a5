"""Counts of each island's starts, which number its incarnations across crashes."""

from __future__ import annotations

import json
from pathlib import Path

from diloco_jax import run_files
from diloco_jax.config import ConfigError
from diloco_jax.files import write_json
from diloco_jax.workdir import held

HELD_S = 60.0
"""Seconds to wait for another island's count; a slow disk takes less."""


def next_attempt(path: Path, name: str) -> int:
    """Count one more attempt of the island in this file, `WORKDIR/attempts.json`.

    Counts begin at 1 and are on disk before they are returned. Several processes may
    count at the same time."""
    lock = path.with_name(run_files.ATTEMPTS_LOCK)
    with held(lock, "another island that starts", HELD_S):
        counts = _read(path)
        counts[name] = counts.get(name, 0) + 1
        write_json(counts, path)
    return counts[name]


def _read(path: Path) -> dict[str, int]:
    if not path.exists():
        return {}
    try:
        counts = json.loads(path.read_bytes())
        return {str(name): int(count) for name, count in counts.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a JSON object of attempts by island ({error}); "
            f"restore it, or give each island's next attempt as --incarnation"
        ) from error
