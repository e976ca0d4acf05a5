"""Memory of fetched payloads: used again when it is free, and not before."""

import numpy as np

from diloco_jax.wire.transfers import LEAST_BYTES, ReceiveBuffers

SIZE = 2 * LEAST_BYTES


def place(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def test_memory_is_lent_again_once_the_last_view_is_gone():
    memory = ReceiveBuffers()
    first = memory.lend(SIZE)
    where, part = place(first), np.frombuffer(first[5:], np.uint8)[3:]
    part[:] = 1
    del first
    other = memory.lend(SIZE)
    other[:] = bytes(SIZE)
    assert place(other) != where
    assert part.all()
    del part
    again = memory.lend(SIZE - 7)
    assert (place(again), len(again)) == (where, SIZE - 7)


def test_what_is_far_too_large_or_too_small_is_not_lent():
    memory = ReceiveBuffers()
    for first, second in ((SIZE, SIZE + 1), (4 * SIZE, SIZE)):
        view = memory.lend(first)
        del view
        view = memory.lend(second)
        assert len(view) == second
        held = view.obj.base
        assert len(getattr(held, "obj", held)) == second


def test_one_buffer_is_kept_at_most():
    memory = ReceiveBuffers()
    views = [memory.lend(SIZE) for _ in range(3)]
    del views
    assert len(memory._free) == 1
    assert len(memory.lend(0)) == 0
