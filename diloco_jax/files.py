"""Files that are whole at any moment, and folders that can hold them."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco_jax.errors import ConfigError
from diloco_jax.paths import naming


def write_json(value: Mapping[str, Any], path: str | Path) -> None:
    """Write JSON as `write_text` does."""
    write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", Path(path))


def write_text(text: str, path: Path) -> None:
    """Replace a file atomically: a reader sees the old text or the new one."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def json_number(value: float | None) -> float | None:
    """Return None (JSON's null) for NaN and infinities, which JSON cannot write."""
    return value if value is not None and math.isfinite(value) else None


def require_writable(folder: Path, option: str) -> None:
    """Raise ConfigError, naming the option, unless files can be made in this folder.

    Call it before long work whose result is written there."""
    if not folder.is_dir():
        raise ConfigError(f"{option} {folder} is not a folder; make it first")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"{option} {folder}: no file can be made there ({error.strerror}); make it "
            f"writable, or give another folder"
        ) from error
