"""A run's parameters as a folder that other tools read.

A fragment of the newest snapshot is read at a time and written into the mapped files,
so that memory holds one fragment and the disk the whole.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError
from diloco_jax.evaluation import kept_folder, kept_pieces, newest_pieces
from diloco_jax.models.build import build
from diloco_jax.sealed import sync_folder
from diloco_jax.weights import families, files, names
from diloco_jax.weights.files import BESIDE, CONFIG
from diloco_jax.weights.first import fill

KINDS = {"float32": "F32", "bfloat16": "BF16"}
Report = Callable[[float], None]
"""Function that is told the share that is done."""


def export(
    config: Config,
    workdir: Path,
    target: Path,
    *,
    cycle: int | None = None,
    dtype: str = "float32",
    shard_bytes: int = files.SHARD_BYTES,
    report: Report = lambda share: None,
) -> int:
    """Write a run's parameters to a new folder; return their number. cycle: a kept one;
    None = those of the newest snapshot.

    The folder appears when all of it is on disk. Raises ConfigError if it exists, the
    workdir has no snapshot, or no family of `families` is like the model.
    """
    model = config.run.model
    written = families.write(model, config.run.sequence_length)
    gains = families.read(written, CONFIG).norm_gain != model.norm_gain
    require_target(target)
    if cycle is not None:
        kept_folder(workdir, cycle)
    built = build(config.run)
    scratch = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    scratch.mkdir()
    try:
        tensors = names.tensors(model)
        arrays = files.make_tensors(
            scratch,
            {tensor.name: tensor.shape for tensor in tensors},
            files.DTYPES[KINDS[dtype]],
            shard_bytes,
        )
        views = names.views(model, arrays)
        norms = {tensor.path for tensor in tensors if tensor.is_norm}
        done, total = 0, sum(array.size for array in arrays.values())
        pieces = (
            newest_pieces(config, workdir, built)
            if cycle is None
            else kept_pieces(config, workdir, built, cycle)
        )
        for piece, value in pieces:
            values = 1 + value if gains and piece.path in norms else value
            fill(views, piece, values)
            done += value.size
            report(done / total)
        beside = workdir if cycle is None else kept_folder(workdir, cycle)
        source = beside / run_files.SOURCE
        for name in BESIDE:
            if (source / name).is_file():
                shutil.copyfile(source / name, scratch / name)
        (scratch / CONFIG).write_text(_config_json(written, source, dtype))
        for path in scratch.iterdir():
            _sync_file(path)  # What was written into its mapping, too.
        sync_folder(scratch)
        scratch.rename(target)
        sync_folder(target.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return total


def require_target(target: Path) -> None:
    """Raise ConfigError unless a new folder of that name can be made."""
    if target.exists():
        raise ConfigError(f"{target} exists; give the name of a new folder")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent}; make it first")


def _config_json(written: dict[str, Any], source: Path, dtype: str) -> str:
    """Return config.json: that of the source, where it has one, with the model's own
    fields over it."""
    kept: dict[str, Any] = {}
    if (source / CONFIG).is_file():
        kept = dict(families.text_config(files.read_json(source / CONFIG)))
        for key in ("rope_parameters", "_sliding_window_pattern", "dtype"):
            kept.pop(key, None)  # Older keys say the same.
        lengths = (kept, written)
        written = written | {
            "max_position_embeddings": max(
                found.get("max_position_embeddings", 0) for found in lengths
            )
        }
    text = json.dumps({**kept, **written, "torch_dtype": dtype}, indent=2)
    return text + "\n"


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
