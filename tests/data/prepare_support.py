"""Prepared folders for tests: how one is made, of what, and what its rows say."""

import json
import os
from pathlib import Path

import numpy as np

from diloco_jax.data.examples import Reader
from diloco_jax.data.prepare import Recipe, prepare
from diloco_jax.data.prepared import PreparedRows
from diloco_jax.data.tokenizers import Bytes

LENGTH = 32


def recipe(tokenizer=None, length=LENGTH, fraction=0.25, **reader):
    return Recipe(
        tokenizer=tokenizer or Bytes(),
        reader=Reader(**reader),
        sequence_length=length,
        validation_fraction=fraction,
    )


def made(tmp_path, how=None, out="out", **options):
    """Prepare tmp_path/in; return the manifest and the rows of both splits."""
    options = {"workers": 1, "part_bytes": 1 << 20, **options}
    folder = tmp_path / out
    prepared = prepare(folder, (str(tmp_path / "in"),), how or recipe(), **options)
    splits = (prepared.train, prepared.validation)
    return prepared, *(PreparedRows(folder, prepared, split) for split in splits)


def documents_of(*sources):
    """All segments' predicted tokens, as bytes; and checks every row's arrays."""
    found = []
    for source in sources:
        for number in range(len(source)):
            row = source[number]
            tokens, segments, weights = (row[name] for name in source.fields)
            assert (tokens.dtype, segments.dtype) == (np.int32, np.int32)
            for field, shape in zip(source.fields.values(), row.values(), strict=True):
                assert shape.shape == field.shape_of(len(weights))
            change = np.diff(segments)
            assert set(change[segments[1:] > 0]) <= {0, 1}
            assert not weights[(change != 0) | (segments[1:] == 0)].any()
            for segment in range(1, segments.max() + 1):
                part = tokens[segments == segment]
                learned = np.concatenate([[0], weights])[segments == segment] > 0
                found.append((part, learned))
    return found


def write_lines(path: Path, objects, opened=open):
    path.parent.mkdir(exist_ok=True)
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(found) + "\n" for found in objects)


def many(tmp_path, count=400):
    for number in range(4):
        objects = [
            {"text": f"{number}/{i} " + "word " * (i % 50)} for i in range(count)
        ]
        write_lines(tmp_path / "in" / f"{number}.jsonl", objects)


def copy_of(path: Path):
    """Change the time of a file, as a copy does."""
    then = path.stat().st_mtime_ns + 5 * 10**9
    os.utime(path, ns=(then, then))
