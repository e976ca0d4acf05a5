"""What a new run puts into its workdir before anything has come of it."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from diloco_jax import run_files


class Beginning:
    """Made before the workdir is; `undo` is for a start that failed."""

    def __init__(self, folder: str) -> None:
        """folder: that of the run; empty if it is still to be named."""
        self._existed = bool(folder) and Path(folder).is_dir()
        self._before = set(Path(folder).iterdir()) if self._existed else set()

    def undo(self, workdir: Path, *, keep_logs: bool = False) -> None:
        """The workdir is as it was. keep_logs: they tell why."""
        before = {path.absolute() for path in self._before}
        kept = before | ({workdir / run_files.LOGS} if keep_logs else set())
        for path in set(workdir.iterdir()) - kept:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if not self._existed:
            with contextlib.suppress(OSError):  # The logs are there.
                workdir.rmdir()
