"""The persistent compilation cache: what one process compiled, the next one loads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from diloco_jax import run_files

VARIABLE = "JAX_COMPILATION_CACHE_DIR"
MAX_BYTES = 2 << 30
"""What a process that starts leaves of our cache: the entries used last."""
ENTRY = "-cache"
"""How jax ends the name of an entry."""


def of_user() -> Path:
    """The cache that a user's commands share on this machine."""
    return Path(os.environ.get(VARIABLE) or _ours())


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
    # What others may keep there too, whole entries of it stay.
    _tidy(folder, MAX_BYTES if not named or folder == _ours() else None)
    for name, value in settings.items():
        jax.config.update(name, value)  # type: ignore[no-untyped-call]


def _ours() -> Path:
    """Where the cache is if nobody says so."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "diloco_jax" / "jax"


def _tidy(folder: Path, max_bytes: int | None) -> None:
    """Removes the entries that were not used for longest, above `max_bytes`, and empty
    ones: their writer was killed, and jax never writes an entry that exists. Other
    files stay, and so does what this process may not remove.

    Another process may be about to fill an empty one, or to read one that goes: then
    that is compiled again. So is an entry that is read while it is half written, or
    of which a writer left a part; jax warns of it.
    """
    entries = []
    with (
        contextlib.suppress(FileNotFoundError, PermissionError),
        os.scandir(folder) as found,
    ):
        for entry in found:
            if not entry.name.endswith(ENTRY):
                continue
            with contextlib.suppress(FileNotFoundError):
                stat = entry.stat(follow_symlinks=False)
                used = max(stat.st_atime, stat.st_mtime)
                entries.append(
                    (used if stat.st_size else 0.0, entry.path, stat.st_size)
                )
    kept = 0
    for used, path, size in sorted(entries, reverse=True):
        kept += size
        if not used or (max_bytes is not None and kept > max_bytes):
            with contextlib.suppress(OSError):
                os.unlink(path)
