"""Files of Parquet, read a few rows at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from diloco_jax.errors import ConfigError

ROWS_AT_ONCE = 256


@contextlib.contextmanager
def open_table(path: str) -> Iterator[Any]:
    """Open a Parquet file; raise ConfigError, naming the file, if it cannot be read as
    one.
    """
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package pyarrow; pip install 'diloco-jax[text]'"
        ) from error
    try:
        with parquet.ParquetFile(path) as table:
            yield table
    except (ArrowException, OSError) as error:
        raise ConfigError(
            f"SOURCES: {path} cannot be read as Parquet ({error}); copy it again, or "
            f"leave it out"
        ) from error


def rows(path: str, groups: range, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of these groups as dicts of these columns."""
    with open_table(path) as table:
        for batch in table.iter_batches(ROWS_AT_ONCE, list(groups), columns=columns):
            yield from batch.to_pylist()
