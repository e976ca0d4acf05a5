"""The persistent compilation cache: what one process compiled, the next one loads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from diloco_jax import run_files

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MAX_BYTES = 2 << 30
"""What a process that starts leaves of the cache: the entries used last."""


def of_user() -> Path:
    """The cache that a user's commands share on this machine."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get(VARIABLE)
    return Path(folder or Path(home).expanduser() / "diloco_jax" / "jax")


def of_run(workdir: Path) -> Path:
    """The cache that goes with a run's folder."""
    return workdir / run_files.CACHE


def use_cache(folder: Path) -> None:
    """Caches every compilation in `JAX_COMPILATION_CACHE_DIR`, or in this folder."""
    import jax  # Late: a launcher that asks where the cache is needs none.

    settings: dict[str, int | str] = {
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        # With a bound, jax looks at every entry before it writes one, under a lock
        # that all processes wait for: 0.2 s for each of them where there are 2400.
        "jax_compilation_cache_max_size": -1,
    }
    if named := os.environ.get(VARIABLE):
        folder = Path(named)
    else:
        settings["jax_compilation_cache_dir"] = str(folder)
    _tidy(folder)
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


def _tidy(folder: Path) -> None:
    """Removes what was not used for longest, above `MAX_BYTES`, and empty entries:
    their writer was killed, and jax never writes an entry that exists.

    Another process may be about to fill an empty one, or to read one that goes: then
    that is compiled again. So is an entry that is read while it is half written, or
    of which a writer left a part; jax warns of it.
    """
    entries = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat()
                used = max(stat.st_atime, stat.st_mtime)
                entries.append(
                    (used if stat.st_size else 0.0, entry.path, stat.st_size)
                )
    kept = 0
    for used, path, size in sorted(entries, reverse=True):
        kept += size
        if not used or kept > MAX_BYTES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
