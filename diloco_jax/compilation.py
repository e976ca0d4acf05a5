"""The persistent compilation cache: what one process compiled, the next one loads."""

from __future__ import annotations

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
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        settings["jax_compilation_cache_dir"] = str(workdir / "jax-cache")
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]
