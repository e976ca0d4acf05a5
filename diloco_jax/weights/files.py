"""Folders of safetensors files: mapped for reading, filled in place for writing.

The library checks a file as a whole. Arrays are then views of the mapped file, since
the library's own functions hold whole tensors to read, and whole files to write.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from diloco_jax.errors import ConfigError
from diloco_jax.files import how_to_mend, parse_json

DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"
GENERATION = "generation_config.json"
BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    GENERATION,
)
"""Files beside a model's weights that an export hands on."""
SHARD_BYTES = 5 << 30
"""Most bytes of one file, unless a tensor alone has more."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raise ConfigError, naming the file, if there is none."""
    try:
        found = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {path}; give the folder of a model, with config.json and "
            f"safetensors files"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON ({error}); {how_to_mend(path)}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is no JSON object; copy it again")
    return found


def read_tensors(
    folder: Path, needed: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """Return all tensors of a folder by name, as views of the mapped files.

    A single file counts before an index, which may be older, as in other readers.

    Args:
      needed: tells if a tensor that the index names has to be there.

    Raises ConfigError, naming the file, if one is missing, truncated or of a dtype that
    is no float.
    """
    index, single = folder / INDEX, folder / SINGLE
    if single.is_file() or not index.is_file():
        return _mapped(single)
    where = read_json(index).get("weight_map")
    try:
        where = msgspec.convert(where, dict[str, str])
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{index}: weight_map names no files of tensors ({error}); copy it again"
        ) from error
    found: dict[str, np.ndarray] = {}
    for name in sorted(set(where.values())):
        wanted = [t for t, file in where.items() if file == name and needed(t)]
        if not wanted and not (folder / name).is_file():
            continue
        inside = _mapped(folder / name)
        if lacking := [tensor for tensor in wanted if tensor not in inside]:
            raise ConfigError(
                f"{index} says that {name} has {lacking[0]}, but it has not; copy both "
                f"files again"
            )
        found |= inside
    return found


def make_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype[Any],
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, np.ndarray]:
    """Make the files of these tensors, in their order; return the tensors by name, to
    be filled in place."""
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    total = used = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if used and used + size > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used, total = used + size, total + size
    arrays: dict[str, np.ndarray] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = SINGLE if len(shards) == 1 else several
        arrays |= _make(folder / file, shard, dtype)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        text = json.dumps(
            {"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2
        )
        (folder / INDEX).write_text(text + "\n")
    return arrays


def _mapped(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ConfigError(
            f"there is no {path}; give a folder with all its safetensors files"
        )
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"{path} is no whole safetensors file ({error}); {how_to_mend(path)}"
        ) from error
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for name, facts in header.items():
        if facts["dtype"] not in DTYPES:
            raise ConfigError(
                f"{path}: {name} is {facts['dtype']}; weights are read as "
                f"{', '.join(DTYPES)}"
            )
    data = np.memmap(path, np.uint8, "r", offset=8 + length)
    return {
        name: data[slice(*facts["data_offsets"])]
        .view(DTYPES[facts["dtype"]])
        .reshape(facts["shape"])
        for name, facts in header.items()
    }


def _make(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any]
) -> dict[str, np.ndarray]:
    """Make one file: the length of the header, the header, the tensors' bytes."""
    kind = next(name for name, known in DTYPES.items() if known == dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": kind,
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Tensors begin where their elements can.
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    data = np.memmap(path, np.uint8, "r+", offset=8 + len(text))
    return {
        name: data[slice(*header[name]["data_offsets"])].view(dtype).reshape(shape)
        for name, shape in shapes.items()
    }
