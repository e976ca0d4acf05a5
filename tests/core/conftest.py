"""Strict numerics: shapes of different rank do not mix silently."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_ranks() -> Iterator[None]:
    with jax.numpy_rank_promotion("raise"):
        yield
