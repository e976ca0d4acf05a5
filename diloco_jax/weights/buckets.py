"""Weights in a bucket: a copy on this machine for as long as somebody reads it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from etils.epath import Path as Folder

from diloco_jax import run_files, storage
from diloco_jax.coordinator import snapshots
from diloco_jax.errors import ConfigError
from diloco_jax.files import is_bucket
from diloco_jax.weights.files import BESIDE, CONFIG, INDEX

logger = logging.getLogger(__name__)

BLOCK_BYTES = 64 << 20
"""Bytes that are in memory at a time."""
PREFIX, SUFFIX = f"{run_files.SOURCE}.", ".tmp"
"""Beginning and end of a copy's name. A run that begins anew removes such folders."""


@contextlib.contextmanager
def at_hand(
    kind: str, folder: str, *, arrays: bool, scratch: Path | None = None
) -> Iterator[Path]:
    """Yield a source's folder on this machine: itself, or a copy if it is in a bucket.

    The copy ends with the block; arrays that are mapped from it stay readable.

    Args:
      kind: "hf" or "run", as in `init_option.KINDS`.
      arrays: copy the arrays too, not only the small files that describe them.
      scratch: where the copy lies; None = the machine's folder of temporary files.

    Raises:
      ConfigError: no such source there, or it may not be read. Messages about the copy
        name the bucket. StorageAway: the bucket does not answer.
    """
    if not is_bucket(folder):
        yield Path(folder)
        return
    if scratch is not None:
        for left in scratch.glob(f"{PREFIX}*{SUFFIX}"):  # By a process that was killed.
            shutil.rmtree(left)
    with tempfile.TemporaryDirectory(SUFFIX, PREFIX, scratch) as made:
        try:
            _copy(kind, Folder(folder), Path(made), arrays=arrays)
            yield Path(made)
        except ConfigError as error:
            raise ConfigError(str(error).replace(made, folder)) from error


def _copy(kind: str, there: Folder, here: Path, *, arrays: bool) -> None:
    began, total = time.monotonic(), 0
    try:
        for path in _files(kind, there, arrays=arrays):
            target = here / path.relative_to(there)
            target.parent.mkdir(parents=True, exist_ok=True)
            with path.open("rb") as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, BLOCK_BYTES)
            total += target.stat().st_size
            if arrays:
                seconds = max(time.monotonic() - began, 1e-3)
                logger.info(
                    "copied %s: %.3g GB so far, %.3g MB/s",
                    path,
                    total / 1e9,
                    total / seconds / 1e6,
                )
    except (ConfigError, FileNotFoundError) as error:
        raise ConfigError(
            f"{there} is no source of weights ({error}); give --init "
            f"{kind}:gs://BUCKET/FOLDER, or s3://, of a folder that has config.json"
        ) from error
    except Exception as error:
        # Each bucket backend has its own error classes, and S3's makes OSErrors of
        # them; a full disk is ours.
        storage.raise_if_away(there, error)
        if isinstance(error, OSError) and error.errno and error.__cause__ is None:
            raise
        raise ConfigError(storage.cannot_read(there, error)) from error


def _files(kind: str, there: Folder, *, arrays: bool) -> Iterator[Folder]:
    """Yield what a source consists of, the files that describe it first."""
    if kind == "run":
        yield there / run_files.CONFIG
        yield there / run_files.FACTS
        kept = there / run_files.SOURCE
        yield from sorted(kept.iterdir()) if kept.is_dir() else ()
        if arrays:
            yield from _newest(there / run_files.CHECKPOINTS / "coordinator")
        return
    names = {path.name for path in there.iterdir()}
    yield there / CONFIG
    yield from (there / name for name in (INDEX, *BESIDE) if name in names)
    if arrays:
        yield from (there / n for n in sorted(names) if n.endswith(".safetensors"))


def _newest(folder: Folder) -> Iterator[Folder]:
    """Yield the newest snapshots of a run, where its workdir has any."""
    states = snapshots.states(folder) if folder.is_dir() else []
    for number in states[-1:]:
        yield snapshots.state_path(folder, number)
        fragments = (path.name for path in folder.iterdir())
        for fragment in sorted(int(name) for name in fragments if name.isdecimal()):
            newest = snapshots.versions(folder, fragment)[-1]
            yield snapshots.fragment_path(folder, fragment, newest)
