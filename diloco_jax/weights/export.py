"""A run's parameters as a folder that other tools read.

A fragment of the newest snapshot is read at a time and written into the mapped files,
so that memory holds one fragment and the disk the whole.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError, ModelConfig
from diloco_jax.core.fragments import from_pieces
from diloco_jax.evaluation import kept_folder, kept_pieces, newest_pieces
from diloco_jax.files import require_writable
from diloco_jax.models.build import build
from diloco_jax.models.plan import build_plan
from diloco_jax.sealed import sync_path
from diloco_jax.weights import families, files, names
from diloco_jax.weights.adapted import base_run, merged_leaves
from diloco_jax.weights.adapter import write_adapter
from diloco_jax.weights.files import BESIDE, CONFIG
from diloco_jax.weights.first import fill

KINDS = {"float32": "F32", "bfloat16": "BF16"}
Report = Callable[[float], None]
"""Called with the share that is done."""


def export(
    config: Config,
    workdir: Path,
    target: Path,
    *,
    cycle: int | None = None,
    merged: bool = False,
    dtype: str = "float32",
    shard_bytes: int = files.SHARD_BYTES,
    report: Report = lambda share: None,
) -> int:
    """Write a run's parameters to a new folder; return their number.

    The folder appears when all of it is on disk.

    Args:
      cycle: a kept one; None = the parameters of the newest snapshot.
      merged: of a run with adapters, write the weights with them added; otherwise the
        adapters alone.

    Raises ConfigError if the folder exists, the workdir has no snapshot, or no family
    of `families` is like the model.
    """
    run, built = config.run, build(config.run)
    require_target(target)
    if cycle is None:
        pieces, beside = newest_pieces(config, workdir, built), workdir
    else:
        beside = kept_folder(workdir, cycle)
        pieces = kept_pieces(config, workdir, built, cycle)
    source = beside / run_files.SOURCE
    if not run.model.lora_rank:
        if merged:
            raise ConfigError(
                "--merged, but the run has no adapters (model.lora_rank = 0); leave it "
                "out"
            )
        with _appearing(target, source) as scratch:
            write = _Whole(run.model, run.sequence_length, scratch, dtype, shard_bytes)
            for piece, value in pieces:
                fill(write.views, piece, write.scaled(piece.path, value))
                report(write.share_done(value.size))
            return write.finish(source)
    adapters = from_pieces(build_plan(run, built), {p.name: v for p, v in pieces})
    with _appearing(target, source) as scratch:
        if not merged:
            return write_adapter(run.model, adapters, scratch)
        plain = base_run(run).model
        write = _Whole(plain, run.sequence_length, scratch, dtype, shard_bytes)
        for path, value in merged_leaves(run, adapters):
            write.put(path, write.scaled(path, value))
            report(write.share_done(value.size))
        return write.finish(source)


class _Whole:
    """The files of a whole model in a folder, to be filled."""

    def __init__(
        self,
        model: ModelConfig,
        sequence_length: int,
        folder: Path,
        dtype: str,
        shard_bytes: int,
    ) -> None:
        self._folder, self._dtype = folder, dtype
        self._written = families.write(model, sequence_length)
        read = families.read(self._written, CONFIG)
        self._gains = read.norm_gain != model.norm_gain
        tensors = names.tensors(model)
        arrays = files.make_tensors(
            folder,
            {tensor.name: tensor.shape for tensor in tensors},
            files.DTYPES[KINDS[dtype]],
            shard_bytes,
        )
        self.views = names.views(model, arrays)
        self._norms = {tensor.path for tensor in tensors if tensor.is_norm}
        self._done, self._total = 0, sum(array.size for array in arrays.values())

    def scaled(self, path: tuple[str, ...], value: Any) -> Any:
        """Return a parameter as the family has it: its norms may multiply otherwise."""
        return 1 + value if self._gains and path in self._norms else value

    def put(self, path: tuple[str, ...], value: np.ndarray) -> None:
        """Write a whole parameter, stacked if it is of the layers."""
        place: Any = self.views
        for key in path:
            place = place[key]
        if not isinstance(place, list):
            place[...] = value
            return
        for layer, own in zip(place, value, strict=True):
            layer[...] = own

    def share_done(self, more: int) -> float:
        """Count so many values more; return the share that is written."""
        self._done += more
        return self._done / self._total

    def finish(self, source: Path) -> int:
        """Write config.json; return the number of values."""
        text = _config_json(self._written, source, self._dtype)
        (self._folder / CONFIG).write_text(text)
        return self._total


@contextlib.contextmanager
def _appearing(target: Path, source: Path) -> Iterator[Path]:
    """Yield a folder that becomes the target when the block ends, with the small files
    of a source in it; nothing is left of a block that fails."""
    scratch = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    scratch.mkdir()
    try:
        yield scratch
        for name in BESIDE:
            if (source / name).is_file():
                shutil.copyfile(source / name, scratch / name)
        for path in scratch.iterdir():
            sync_path(path)  # What was written into its mapping, too.
        sync_path(scratch)
        scratch.rename(target)
        sync_path(target.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def require_target(target: Path) -> None:
    """Raise ConfigError unless a new folder of that name can be made."""
    if target.exists():
        raise ConfigError(f"{target} exists; give the name of a new folder")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent}; make it first")
    require_writable(target.parent, "DIR")


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
