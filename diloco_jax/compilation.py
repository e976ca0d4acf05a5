"""The persistent compilation cache: what one process compiled, the next one loads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import jax

MAX_BYTES = 2 << 30
"""Size at which the oldest entries go. With a bound the cache is also locked, so that
islands which start together do not read each other's half-written entries."""


def use_cache(workdir: Path) -> None:
    """Caches every compilation in `JAX_COMPILATION_CACHE_DIR`, or in the workdir."""
    settings: dict[str, int | str] = {
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_compilation_cache_max_size": MAX_BYTES,
    }
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        folder = str(workdir / "jax-cache")
        settings["jax_compilation_cache_dir"] = folder
    _drop_torn_entries(Path(folder))
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


def _drop_torn_entries(folder: Path) -> None:
    """Removes entries whose writer was killed between an entry and its time stamp: jax
    fails on them at every later write.

    An entry that is being written just now may go too; it is then compiled again.
    """
    for entry in folder.glob("*-cache"):
        stamp = entry.with_name(entry.name.removesuffix("-cache") + "-atime")
        if not stamp.exists():
            with contextlib.suppress(FileNotFoundError):
                entry.unlink()
