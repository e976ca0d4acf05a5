"""The workdir of a new run, until the run has begun."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from diloco_jax import run_files
from diloco_jax import workdir as workdirs
from diloco_jax.config import Config, ConfigError, differences, shared_fields
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.config.resolving import with_absolute_paths
from diloco_jax.files import is_bucket

# Any of these means that a workdir belongs to a run.
SIGNS_OF_A_RUN = (
    run_files.CONFIG,
    run_files.TAPE,
    run_files.SUMMARY,
    run_files.ATTEMPTS,
)


class Beginning:
    """A context in which `workdir` exists and only this process begins a run in it."""

    def __init__(self, config: Config, config_path: str) -> None:
        """Make the folder that the config names or, if it names none, a new one named
        after its file. Raise ConfigError if that fails."""
        config = with_absolute_paths(config)
        asked = Path(config.placement.workdir)
        self._existed = bool(config.placement.workdir) and asked.is_dir()
        if config.placement.workdir:
            workdirs.make_workdir(asked)
        else:
            asked = _new_folder(config_path)
        self.workdir = asked
        placement = dataclasses.replace(config.placement, workdir=str(asked))
        self._config = dataclasses.replace(config, placement=placement)
        self._held = contextlib.ExitStack()
        self._held.enter_context(
            workdirs.held(asked, "another command that began there")
        )
        self._before = set(asked.iterdir())

    def __enter__(self) -> Beginning:
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def create(self) -> Config:
        """Write `config.json`; return its contents, the config with absolute paths.

        Raises ConfigError, and changes nothing, if a run is there already. Removes the
        files of an earlier start of this run that was killed before the run began."""
        if _came_to_nothing(self.workdir, self._config):
            lock = self.workdir / run_files.LOCK
            if lock.exists():
                with workdirs.held(lock, "a coordinator"):
                    pass
            self._remove(self._before)
            self._before = set(self.workdir.iterdir())
        if any((self.workdir / file).exists() for file in SIGNS_OF_A_RUN):
            raise ConfigError(
                f"workdir {self.workdir} holds {_described(self.workdir, self._config)}"
                f"; give another --workdir{_or_go_on(self.workdir)}"
            )
        write_config_json(self._config, self.workdir / run_files.CONFIG)
        return self._config

    def undo(self, *, keep_logs: bool = False) -> None:
        """Remove everything of the run after a failed start.

        keep_logs: keep the logs, which tell why. Other programs' files stay."""
        self._remove(set(self.workdir.iterdir()) - self._before, keep_logs=keep_logs)
        if not self._existed:
            with contextlib.suppress(OSError):  # It is not empty.
                self.workdir.rmdir()

    def _remove(self, paths: Iterable[Path], *, keep_logs: bool = False) -> None:
        """Remove those of the paths that are files and folders of runs."""
        for path in paths:
            name = path.name
            if name == run_files.LOGS and keep_logs:
                continue
            scratch = name.endswith(".tmp") and name.startswith(run_files.NAMES)
            if name not in run_files.NAMES and not scratch:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _new_folder(config_path: str) -> Path:
    """Make a folder of this command alone: several may begin in the same second."""
    begun = time.strftime("%Y%m%d-%H%M%S")
    name, count = f"{Path(config_path).stem}-{begun}", 1
    parent = Path("runs").absolute()
    workdirs.make_workdir(parent)
    while True:
        folder = parent / (name if count == 1 else f"{name}-{count}")
        try:
            folder.mkdir()
        except FileExistsError:
            count += 1
        else:
            return folder


def _came_to_nothing(workdir: Path, config: Config) -> bool:
    """Return True if this very run was started there but has neither log nor snapshot,
    so that its files are useless."""
    if workdirs.has_begun(workdir) or (workdir / run_files.SUMMARY).exists():
        return False
    try:
        workdirs.require_format(workdir)
        there = read_config_json(workdir / run_files.CONFIG)
    except ConfigError:
        return False
    folder = there.placement.checkpoints or str(workdir / run_files.CHECKPOINTS)
    # A bucket is not looked into. A snapshot gets its name when complete, and that of
    # the state comes last.
    if is_bucket(folder) or any(Path(folder).glob("*/state-*.snapshot")):
        return False
    return not differences(shared_fields(there.run), shared_fields(config.run))


def _described(workdir: Path, config: Config) -> str:
    """Describe the run that is there, compared with the one that was to begin there."""
    try:
        there = read_config_json(workdir / run_files.CONFIG).run
    except ConfigError:
        return "another run (its config.json cannot be read)"
    where = ("in that run", "in this config")
    lines = differences(shared_fields(there), shared_fields(config.run), where)
    if lines:
        return f"another run, with {'; '.join(lines)}"
    return "this run" if workdirs.holds_run(workdir) else "another run of this config"


def _or_go_on(workdir: Path) -> str:
    if not workdirs.holds_run(workdir):
        return ""
    return f", or go on with that run: diloco run --resume {workdir}"
