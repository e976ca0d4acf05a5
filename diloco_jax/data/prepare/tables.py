"""Files of Parquet, read a few rows at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from diloco_jax.errors import ConfigError
from diloco_jax.files import how_to_mend

ROWS_AT_ONCE = 256


@contextlib.contextmanager
def open_table(path: str) -> Iterator[Any]:
    """Open a Parquet file; raise ConfigError, naming the file, if it cannot be read as
    one.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package pyarrow; pip install 'diloco-jax[text]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as table:
            yield table
    except Exception as error:  # The library raises errors of many kinds.
        raise ConfigError(
            f"SOURCES: {path} cannot be read as Parquet ({error}); "
            f"{how_to_mend(path)}, write it anew, or leave it out"
        ) from error


def rows(path: str, group: int, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a group as dicts of these columns."""
    first = 0
    with open_table(path) as table:
        for batch in table.iter_batches(ROWS_AT_ONCE, [group], columns=columns):
            last = first + batch.num_rows - 1
            try:
                found = batch.to_pylist()
            except Exception as error:
                where = f"row group {group}, rows {first} to {last}"
                raise ValueError(f"{where}: {error}") from error
            yield from found
            first = last + 1
