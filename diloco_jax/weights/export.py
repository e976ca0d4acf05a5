"""A run's parameters as a folder that other tools read.

A fragment of the newest snapshot is read at a time and written into the mapped files,
so that memory holds one fragment and the disk the whole. Of a run that goes on, one
cycle is gathered from its coordinator.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from diloco_jax import run_files
from diloco_jax.config import Config, ConfigError, RunConfig
from diloco_jax.coordinator.holding import fragment_snapshots
from diloco_jax.core.fragments import LAYERS, Piece, from_pieces
from diloco_jax.data.tokenizers import find_tokenizer, open_tokenizer
from diloco_jax.evaluation import kept_folder, kept_pieces, newest_pieces
from diloco_jax.files import require_writable, sync_path
from diloco_jax.models.build import build, build_plan
from diloco_jax.models.model import Params
from diloco_jax.weights import families, tensor_files
from diloco_jax.weights.adapted import base_run, merged_leaves, write_adapter
from diloco_jax.weights.first import fill
from diloco_jax.weights.tensor_files import BESIDE, CONFIG, GENERATION, PREPROCESSOR
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import Busy, ConnectionLost

KINDS = {"float32": "F32", "bfloat16": "BF16"}
TOKENS = ("bos_token_id", "eos_token_id")
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
    shard_bytes: int = tensor_files.SHARD_BYTES,
    report: Report = lambda share: None,
) -> tuple[int, str]:
    """Write a run's parameters to a new folder; return their number, and what other
    tools do not find in it, "" if nothing.

    The folder appears when all of it is on disk. A model of `model.factory` leaves as
    its arrays alone, by the names of its `init`.

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
    if merged and not run.model.lora_rank:
        raise ConfigError(
            "--merged, but the run has no adapters (model.lora_rank = 0); leave it out"
        )
    if run.model.lora_rank:
        adapters = from_pieces(build_plan(run, built), {p.name: v for p, v in pieces})
        if not merged:
            with _appearing(target, source) as scratch:
                return write_adapter(run.model, adapters, scratch), ""
        run, pieces = base_run(run), _by_layer(merged_leaves(run, adapters))
    if run.model.train:
        pieces = itertools.chain(pieces, _by_layer(merged_leaves(run, {})))
        run = base_run(run)
    with _appearing(target, source) as scratch:
        lacks = _write_settings(run, source, scratch, dtype)
        views, total, gains = _make_files(run, scratch, dtype, shard_bytes)
        done = 0
        for piece, value in pieces:
            fill(views, piece, 1 + value if piece.path in gains else value)
            done += value.size
            report(done / total)
        return total, lacks


def _by_layer(
    leaves: Iterator[tuple[tuple[str, ...], np.ndarray]],
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yield whole parameters as pieces, those of the layers one by one."""
    for path, value in leaves:
        if LAYERS not in path:
            yield Piece(path, -1, value.shape, False), value
            continue
        for layer, own in enumerate(value):
            yield Piece(path, layer, own.shape, False), own


def _make_files(
    run: RunConfig, folder: Path, dtype: str, shard_bytes: int
) -> tuple[Params, int, set[tuple[str, ...]]]:
    """Make the files of a whole model in a folder. Return its parameters as views of
    them, to be filled, their number, and those that the files have plus 1."""

    def made(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        kind = tensor_files.DTYPES[KINDS[dtype]]
        return tensor_files.make_tensors(folder, shapes, kind, shard_bytes)

    views: Params
    gains = set[tuple[str, ...]]()
    if run.model.factory:
        leaves, structure = jax.tree.flatten_with_path(build(run).shapes())
        names = ["/".join(key.key for key in path) for path, _ in leaves]
        shapes = [leaf.shape for _, leaf in leaves]
        arrays = made(dict(zip(names, shapes, strict=True)))
        views = jax.tree.unflatten(structure, list(arrays.values()))
    else:
        tensors = tensor_files.tensors(run.model)
        arrays = made({tensor.name: tensor.shape for tensor in tensors})
        views = tensor_files.views(run.model, arrays)
        # The family's norms may multiply by the scale itself.
        written = families.read(families.write(run.model, run.sequence_length), "")
        if written.norm_gain != run.model.norm_gain:
            gains = {tensor.path for tensor in tensors if tensor.is_norm}
    return views, sum(array.size for array in arrays.values()), gains


def _write_settings(run: RunConfig, source: Path, folder: Path, dtype: str) -> str:
    """Write the settings beside the tensors; return what other tools do not find.

    source: the small files that the run kept of what it started from."""
    if run.model.factory:
        return (
            f"model.factory = {run.model.factory!r}: the arrays by their names, and no "
            f"config.json, since no other tool knows the model"
        )
    written = families.write(run.model, run.sequence_length)
    found, lacks = _settings(written, source, dtype)
    if run.model.vision.layers and not (source / PREPROCESSOR).is_file():
        found |= families.processor(run.model)
    for name, settings in found.items():
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n")
    return lacks


@contextlib.contextmanager
def _appearing(target: Path, source: Path) -> Iterator[Path]:
    """Yield a folder that becomes the target when the block ends, with the small files
    of a source in it; nothing is left of a block that fails."""
    scratch = target.with_name(f"{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    scratch.mkdir()
    try:
        yield scratch
        for name in BESIDE:
            if (source / name).is_file() and not (scratch / name).exists():
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


def _settings(
    written: dict[str, Any], source: Path, dtype: str
) -> tuple[dict[str, Any], str]:
    """Return config.json and, where the source's is not enough, generation_config.json;
    and what lacks in them.

    config.json is that of the source, where it has one, with the model's own fields
    over it; of a model with pictures, part by part. Both name the tokens that begin and
    end a text: other tools take their family's, 1 and 2 of a Llama, where neither does.
    """
    whole: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    decoder = written.get("text_config", written)
    if (source / CONFIG).is_file():
        whole = tensor_files.read_json(source / CONFIG)
        kept = dict(families.text_config(whole))
        for key in ("rope_parameters", "_sliding_window_pattern", "dtype", "auto_map"):
            kept.pop(key, None)  # Older keys say the same; no code comes along.
        lengths = (kept, decoder)
        decoder = decoder | {
            "max_position_embeddings": max(
                found.get("max_position_embeddings", 0) for found in lengths
            )
        }
    saying: dict[str, Any] = {}
    if (source / GENERATION).is_file():
        saying = tensor_files.read_json(source / GENERATION)
    tokens, trouble = _tokens(source, saying, kept)
    named = {key: token for key, token in tokens.items() if token is not None}
    config = {**_filled(kept, tokens), **decoder, "torch_dtype": dtype}
    if "text_config" in written:
        tower = {**whole.get("vision_config", {}), **written["vision_config"]}
        parts = {"text_config": config, "vision_config": tower, "torch_dtype": dtype}
        outer = {k: v for k, v in whole.items() if k not in ("dtype", "auto_map")}
        config = {**outer, **written, **named, **parts}
    found = {CONFIG: config}
    if (said := _filled(saying, named)) != saying:
        found[GENERATION] = said
    return found, "" if "eos_token_id" in named else f"no end token: {trouble}"


def _tokens(source: Path, *settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the tokens that begin and end a text, and why one may lack: of the
    settings, the first that name one, else of the tokenizer; None if there is none."""
    tokens: dict[str, Any] = dict.fromkeys(TOKENS)
    for found in settings:
        tokens = _filled(tokens, {key: found.get(key) for key in TOKENS})
    if None in tokens.values() and (path := find_tokenizer(source)):
        try:
            tokenizer = open_tokenizer(path)
        except ConfigError as error:  # The parameters leave all the same.
            return tokens, str(error)
        theirs = (next(iter(tokenizer.start), None), tokenizer.end)
        tokens = _filled(tokens, dict(zip(TOKENS, theirs, strict=True)))
    return tokens, "none is known"


def _filled(settings: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return settings with others where they have none."""
    lacking = {key: v for key, v in more.items() if settings.get(key) is None}
    return {**settings, **lacking}


POLL_S = 0.5
Answer = TypeVar("Answer")


def gather(
    client: Client, patience_s: float, cycle: int, workdir: Path, report: Report
) -> int:
    """Have a run that goes on keep a cycle, and copy its files as a workdir would have
    them. Return its number.

    No merge of the run waits for this. It takes as long as the run's islands need for
    the cycle, without a deadline while the coordinator answers. Raises Refused for a
    cycle that cannot be kept.

    Args:
      patience_s: within which the coordinator answers, or, if it is away, comes back.
      cycle: 0 = the next one that can be kept.
    """

    def patiently(ask: Callable[[], Answer]) -> Answer:
        broke_off: float | None = None
        while True:
            try:
                return ask()
            except (Busy, ConnectionLost):
                now = time.monotonic()
                broke_off = now if broke_off is None else broke_off
                if now - broke_off > patience_s:
                    raise
                time.sleep(POLL_S)

    def copy(name: str, path: Path) -> None:
        with path.open("wb") as file:
            for part in client.kept(cycle, name):
                file.write(part)

    while True:
        answer = patiently(functools.partial(client.keep, cycle, patience_s))
        cycle, files = int(answer["cycle"]), list(map(str, answer["files"]))
        if files:
            break
        report(float(answer["share"]))
        time.sleep(POLL_S)
    folder = fragment_snapshots.cycle_path(workdir / run_files.KEPT, cycle)
    for done, name in enumerate(files):
        report(done / len(files))
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ConfigError(f"{client.address} names a file {name!r}")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        patiently(functools.partial(copy, name, path))
    return cycle
