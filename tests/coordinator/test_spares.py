"""Memory is used again only once nobody can read it."""

import numpy as np

from diloco_jax.coordinator.holding.store import CACHE_LINE, Spares


def place(array: np.ndarray) -> int:
    return array.ctypes.data


def test_an_array_comes_back_once_it_is_gone_and_not_before() -> None:
    spares = Spares()
    first = spares.array((8, 16), np.float32)
    second = spares.array((8, 16), np.float32)
    at = place(first)
    assert at != place(second)
    assert at % CACHE_LINE == 0
    view, buffer = first[2:4], second.data
    del first, second
    assert spares.array((8, 16), np.float32) is not None, "view and buffer are read"
    del view
    assert place(spares.array((16, 8), np.float32)) == at, "by size, not by shape"
    assert buffer.nbytes == 512


def test_spare_memory_beyond_the_limit_is_freed_and_nothing_that_is_read() -> None:
    spares = Spares()
    kept = spares.array((1000,), np.uint8)
    kept[:] = 7
    gone = [spares.array((1000,), np.uint8) for _ in range(3)]
    del gone
    spares.trim(2 * (1000 + CACHE_LINE))
    assert len(spares._octets) == 3
    spares.trim(0)
    assert len(spares._octets) == 1
    assert (kept == 7).all()
