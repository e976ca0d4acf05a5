"""The run of a workdir (`run.json`), and locks that keep other processes out of it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError, RunConfig, differences, shared_fields
from diloco_jax.config.loading import read_config_json, require_trust, write_config_json
from diloco_jax.files import lock, require_writable, write_json

FORMAT = 17
"""The format of config, log, snapshots and tape. It is one higher when a workdir of
before cannot be read, or when `RunConfig` has other fields, whose fingerprint then
differs."""
RELEASE_S = 2.0
"""Seconds for which a process that was just killed may still hold its locks."""
POLL_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The contents of `run.json`."""

    run_id: str
    begun_unix: float
    """Unix time of the run's beginning, moved on by the time it was stopped."""
    stopped_seconds: float = 0.0
    """Seconds by which `begun_unix` was moved on in all."""
    format: int = FORMAT
    written_by: str = dataclasses.field(
        default_factory=lambda: f"diloco_jax {metadata.version('diloco-jax')}"
    )

    def write(self, workdir: Path) -> None:
        """Replace `run.json` atomically."""
        write_json(dataclasses.asdict(self), workdir / run_files.FACTS)


def make_workdir(workdir: Path) -> None:
    """Make the folder, for its owner alone, if it is missing; raise ConfigError if it
    is not writable."""
    try:
        workdir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"cannot make workdir {workdir}: {error.strerror}; give another --workdir"
        ) from error
    require_writable(workdir, "--workdir")


def require_folder(workdir: Path) -> None:
    """Raise ConfigError if there is no folder of a run that is to go on."""
    if not workdir.is_dir():
        raise ConfigError(
            f"--resume {workdir}: there is no such folder; give the workdir of a run"
        )


def begin_run(config: Config, workdir: Path) -> RunFacts:
    """Draw the id of a new run there; raise ConfigError if the workdir holds a run."""
    if (workdir / run_files.FACTS).exists():
        facts = find_run(config, workdir)
        if has_begun(workdir):
            raise ConfigError(
                f"{workdir} holds run {facts.run_id} already; choose another "
                f"--workdir, or leave --init out to go on with it"
            )
        return facts
    make_workdir(workdir)
    write_config_json(config, workdir / run_files.CONFIG)
    facts = RunFacts(run_id=uuid.uuid4().hex[:16], begun_unix=time.time())
    facts.write(workdir)
    return facts


def has_begun(workdir: Path) -> bool:
    """Return True once the run has its first snapshot: its log is made after that."""
    return (workdir / run_files.LOG).exists()


def find_run(config: Config, workdir: Path, *, extends: bool = False) -> RunFacts:
    """Return the facts of the run there; raise ConfigError if there is none, or one of
    another config.

    extends: the config may have more total_tokens than the run was begun with."""
    facts = read_facts(workdir)
    written = read_config_json(workdir / run_files.CONFIG).run
    if extends:
        written = with_more_tokens(written, config.run.total_tokens)
    if written.fingerprint() != config.run.fingerprint():
        lines = differences(shared_fields(written), shared_fields(config.run))
        raise ConfigError(
            f"{workdir} holds run {facts.run_id} with another config: "
            f"{'; '.join(lines)} (here: the workdir's). Choose another --workdir, "
            f"or go on with its config.json"
        )
    return facts


def with_more_tokens(written: RunConfig, total_tokens: int) -> RunConfig:
    """Return the config of a run that goes on to `total_tokens`, unless it had more."""
    more = max(written.total_tokens, total_tokens)
    return dataclasses.replace(written, total_tokens=more)


def read_config(
    workdir: Path, text: Sequence[str] | None = None, *, trust_code: bool = False
) -> Config:
    """Read a run's `config.json`; raise ConfigError as `require_format` does, and if it
    names code and another user wrote it.

    Args:
      text: paths of the run's text; None = those that the run had.
      trust_code: code that it names may be executed, or will not be.
    """
    require_format(workdir)
    path = workdir / run_files.CONFIG
    config = read_config_json(path)
    require_trust(config.run, path, trust_code=trust_code)
    if text is None:
        return config
    data = dataclasses.replace(config.run.data, paths=tuple(text))
    return dataclasses.replace(config, run=dataclasses.replace(config.run, data=data))


def require_format(workdir: Path) -> None:
    """Raise ConfigError if a run there has another format. A workdir without a run, as
    of an emulation, has no `run.json`."""
    if holds_run(workdir):
        read_facts(workdir)


def holds_run(workdir: Path) -> bool:
    """Return True if the workdir holds a run of any format."""
    return (workdir / run_files.FACTS).is_file()


def read_facts(workdir: Path) -> RunFacts:
    """Read `run.json`; raise ConfigError if it is missing or has another format."""
    path = workdir / run_files.FACTS
    if not path.is_file():
        raise ConfigError(
            f"{workdir} holds no run (there is no run.json), and without --init "
            f"nothing is initialised; give the workdir of the run, or --init for a "
            f"new one"
        )
    try:
        facts = msgspec.json.decode(path.read_bytes(), type=RunFacts)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); restore it from a copy"
        ) from error
    if facts.format != FORMAT:
        raise ConfigError(
            f"{workdir} has format {facts.format}, written by {facts.written_by}; "
            f"this program ({RunFacts(run_id='', begun_unix=0).written_by}) reads "
            f"format {FORMAT}: go on with the version that wrote it, or begin a new run"
        )
    return facts


def read_summary(workdir: Path) -> dict[str, Any]:
    """Read the summary that the last coordinator left; return {} if there is none."""
    path = workdir / run_files.SUMMARY
    try:
        summary = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({error}); restore it from a copy, or "
            f"remove it: the end of the run is written again when it goes on"
        ) from error
    if not (isinstance(summary, dict) and "phase" in summary):
        raise ConfigError(
            f"{path} is no summary of a run: it has no phase; restore it from a copy, "
            f"or remove it"
        )
    return summary


def add_to_summary(workdir: Path, fields: Mapping[str, Any]) -> None:
    """Add fields to the summary of the run there, if the run has ended. Scores join
    those of other tasks."""
    if summary := read_summary(workdir):
        scores = {
            name: {**summary.get(name, {}), **found}
            for name, found in fields.items()
            if isinstance(found, dict)
        }
        write_json({**summary, **fields, **scores}, workdir / run_files.SUMMARY)


@contextlib.contextmanager
def held(path: Path, what: str, patience_s: float = RELEASE_S) -> Iterator[None]:
    """Hold a folder, or a file that is made if missing, for this process alone.

    The lock ends with the block, or with the process, however that ends. Raises
    ConfigError, naming `what` as the holder, if it is not free within `patience_s`.
    """
    folder = path.is_dir()
    flags = os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, flags, 0o666)
    try:
        _lock(descriptor, path, what, patience_s)
        # The open file may not be the one that has the name now.
        still = False
        with contextlib.suppress(FileNotFoundError):
            still = os.path.samestat(path.stat(), os.fstat(descriptor))
        if not still:
            raise ConfigError(f"{path} was removed by {what} just now; start once more")
        if not folder:
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Tell whether some process holds a folder (`held`)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int, path: Path, what: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not lock(descriptor, path):
        if time.monotonic() >= deadline:
            holder = "" if path.is_dir() else path.read_text()
            raise ConfigError(
                f"{path if path.is_dir() else path.parent} is in use by {what}"
                f"{f', process {holder},' if holder else ''} on this machine; end "
                f"that first, or give another workdir"
            )
        time.sleep(POLL_S)
