"""Prepared folders as the data of a run, alone or in a mixture."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from diloco_jax.config import ConfigError, DataConfig, ModelConfig, RunConfig
from diloco_jax.data.prepared.contents import (
    NAME,
    SAMPLES,
    Contents,
    is_prepared,
    read_manifest,
    require_whole,
)
from diloco_jax.data.prepared.folder import folder_at
from diloco_jax.data.prepared.rows import PreparedRows
from diloco_jax.data.shares import slots_of
from diloco_jax.data.tokenizers.opening import open_tokenizer, require_digest
from diloco_jax.files import is_bucket
from diloco_jax.protocol.messages import MAX_SOURCES


class Folders(NamedTuple):
    """Prepared folders, in the order of `data.paths`."""

    train: tuple[PreparedRows, ...]
    validation: tuple[PreparedRows, ...]
    weights: tuple[float, ...]
    """Shares of several folders; none for one."""
    digest: str
    largest: int
    """Highest token of the rows."""
    bytes_per_token: float


def are_prepared(data: DataConfig) -> bool:
    """Tell if the data is prepared folders; raise ConfigError if some of it is."""
    found = [path for path in data.paths if is_prepared(path)]
    if found and len(found) < len(data.paths):
        other = next(path for path in data.paths if path not in found)
        raise ConfigError(
            f"data.paths: {found[0]} is a prepared folder and {other} is none (it has "
            f"no {NAME}); prepare both, or give one kind"
        )
    if data.weights and not found:
        raise ConfigError(
            f"data.weights = {data.weights}, but {', '.join(data.paths) or 'the text'} "
            f"is no prepared folder; make some with `diloco data prepare`"
        )
    for path in data.paths:
        if is_bucket(path) and not found:
            raise ConfigError(
                f"data.paths: {path} is no prepared folder (it has no {NAME}), and of "
                f"a bucket nothing else is read; make one with `diloco data prepare`, "
                f"copy it there (`gcloud storage rsync -r`), or mount the bucket"
            )
    return bool(found)


def open_folders(run: RunConfig) -> Folders:
    """Open the prepared folders of a run: read their manifests, compare sizes and a few
    chunks of their files. Raise ConfigError if they are not the run's."""
    data = run.data
    paths = [str(folder_at(path)) for path in data.paths]
    if doubled := {path for path in paths if paths.count(path) > 1}:
        raise ConfigError(
            f"data.paths names {min(doubled)} {paths.count(min(doubled))} times; give "
            f"it once, and the sum of its weights in data.weights"
        )
    found = [read_manifest(path) for path in paths]
    for path, prepared in zip(paths, found, strict=True):
        _require_length(path, prepared, run.sequence_length)
        require_digest(
            prepared.tokenizer.digest,
            found[0].tokenizer.digest,
            path,
            f"that of {paths[0]}",
        )
    weights = _weights(data, [prepared.train.counts.rows for prepared in found])
    digest = _digest(found, weights)
    if data.digest and data.digest != digest:
        raise ConfigError(
            f"data.digest = {data.digest} in the run's config, but the data here "
            f"({', '.join(data.paths)}) has {digest}; give the run's folders "
            f"(--data.paths), in its order and with its data.weights"
        )
    for path, prepared in zip(paths, found, strict=True):
        require_whole(path, prepared, max(1, SAMPLES // len(paths)))
    counts = [prepared.validation.counts for prepared in found]
    return Folders(
        tuple(PreparedRows(p, f, f.train) for p, f in zip(paths, found, strict=True)),
        tuple(
            PreparedRows(p, f, f.validation) for p, f in zip(paths, found, strict=True)
        ),
        weights,
        digest,
        max(_largest(p, f, run.model) for p, f in zip(paths, found, strict=True)),
        sum(c.text_bytes for c in counts) / sum(c.predicted for c in counts),
    )


def tokenizer_of(data: DataConfig) -> str | None:
    """Return the path of the data's tokenizer; "" for bytes, None if it is not known.

    The path is `data.tokenizer`, or that of the file in the prepared folder. Raises
    ConfigError, with both digests, if `data.tokenizer` is not the folder's.
    """
    if not data.paths or not is_prepared(data.paths[0]):
        return data.tokenizer or None
    folder = folder_at(data.paths[0])
    tokens = read_manifest(data.paths[0]).tokenizer
    if data.tokenizer:
        given = open_tokenizer(data.tokenizer)
        require_digest(tokens.digest, given.digest, str(folder), given.name)
    return str(folder.at_hand(tokens.file)) if tokens.file else ""


def _weights(data: DataConfig, rows: Sequence[int]) -> tuple[float, ...]:
    """Return the shares of several folders, by their rows if none are given."""
    weights = data.weights or tuple(map(float, rows))
    if len(weights) != len(rows):
        raise ConfigError(
            f"data.weights has {len(weights)} numbers, data.paths {len(rows)} folders; "
            f"give one number for each folder"
        )
    if len(rows) > MAX_SOURCES:
        raise ConfigError(
            f"data.paths has {len(rows)} folders, and a mixture has at most "
            f"{MAX_SOURCES}; prepare several together"
        )
    if not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(
            f"data.weights = {weights}; each has to be above 0, and finite"
        )
    try:
        slots_of(weights)
    except ValueError as error:
        raise ConfigError(
            f"data.weights: {error}; raise it, or leave its folder out"
        ) from error
    return weights if len(rows) > 1 else ()


def _largest(path: str, prepared: Contents, model: ModelConfig) -> int:
    """Return the highest token of a folder's rows. Where it is not noted, it is that of
    the tokenizer; raise ConfigError if the bundled model has no row for that."""
    noted = [split.largest for split in (prepared.train, prepared.validation)]
    if min(noted) >= 0:
        return max(noted)
    tokens = prepared.tokenizer.vocab_size
    if tokens > model.vocab_size and not model.factory:
        raise ConfigError(
            f"model.vocab_size = {model.vocab_size}, but the tokenizer of {path} has "
            f"{tokens} tokens, and the folder, of an older version, does not say which "
            f"its rows have; make it again with `diloco data prepare`"
        )
    return tokens - 1


def _digest(found: Sequence[Contents], weights: Sequence[float]) -> str:
    """Return the digest of one folder, or of several and their shares."""
    if not weights:
        return found[0].digest
    parts = [prepared.digest for prepared in found]
    return hashlib.sha256(f"{parts}:{slots_of(weights)}".encode()).hexdigest()[:16]


def _require_length(path: str, prepared: Contents, sequence_length: int) -> None:
    if prepared.sequence_length != sequence_length:
        raise ConfigError(
            f"sequence_length = {sequence_length}, but the rows of {path} have "
            f"{prepared.sequence_length} predicted tokens; set it to "
            f"{prepared.sequence_length}, or prepare the data again with "
            f"--sequence-length {sequence_length}"
        )
