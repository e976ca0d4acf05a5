"""Runs whose tables are weighed by use. `test_replay` repeats them from their tape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from emulate_support import check_books, make_config

from diloco_jax import Config, ConfigError, emulate
from diloco_jax.models.build import build
from diloco_jax.simulation import laboratory
from diloco_jax.weights.first import first_pieces


def by_use(text: str, **settings) -> Config:
    config = make_config(text, weights_by_use="rows", **settings)
    return config.replace("model.tied_embeddings", False)


def test_a_row_that_no_text_has_keeps_its_first_bits(text) -> None:
    """Decay moves it on every island, and each drops that with its adoption."""
    config = by_use(text, steps=24)
    found = emulate(config)
    check_books(found)
    run = config.run
    assert run.inner.weight_decay > 0
    first = first_pieces(run, build(run))
    read = b"".join(path.read_bytes() for path in Path(text).iterdir())
    used = np.bincount(np.frombuffer(read, np.uint8), minlength=256) > 0
    used[0] = True  # Between two files.
    before, after = first["embedding"][:256], found.params["embedding"][:256]
    assert not used.all()
    np.testing.assert_array_equal(after[~used], before[~used])
    assert (after[used] != before[used]).any(axis=1).mean() > 0.9
    plain = emulate(config.replace("sync.weights_by_use", "none"))
    moved = plain.params["embedding"][:256] != before
    assert moved[~used].any(axis=1).all()


def test_a_tied_table_keeps_the_islands_tokens(text) -> None:
    config = make_config(text, steps=8).replace("model.tied_embeddings", True)
    on = config.replace("sync.weights_by_use", "rows")
    np.testing.assert_array_equal(
        emulate(on).params["embedding"], emulate(config).params["embedding"]
    )


def test_a_laboratory_has_no_counts(text) -> None:
    config = by_use(text).replace("islands.b.batch_size", 4)
    with pytest.raises(ConfigError, match=r"weights_by_use = .rows., and a laboratory"):
        laboratory.run(config)
