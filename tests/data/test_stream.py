"""Leases in, batches out, each position once and in order."""

import threading

import numpy as np
import pytest

from diloco_jax.data.stream import LeasedStream
from diloco_jax.data.windows import Windows
from diloco_jax.policy.events import Span

TEXT = np.random.default_rng(0).integers(1, 256, 5000).astype(np.uint8)
WAIT_S = 20.0


@pytest.fixture
def windows():
    return Windows(TEXT, 8, seed=0)


@pytest.fixture
def stream(windows):
    stream = LeasedStream(windows, sequences_per_step=4)
    yield stream
    stream.close()


def test_batches_are_the_granted_positions_in_order(windows, stream):
    stream.grant(0, Span(100, 106))
    stream.grant(6, Span(300, 301))
    stream.grant(7, Span(50, 56))
    drawn = [*range(100, 106), 300, *range(50, 56)]
    for step in range(3):
        expected = windows.batch(np.array(drawn[4 * step : 4 * step + 4]))
        np.testing.assert_array_equal(stream.next_batch(WAIT_S), expected)
    assert (stream.granted, stream.consumed) == (13, 12)
    assert stream.next_batch(0.0) is None


def test_repeated_grants_are_idempotent(windows, stream):
    stream.grant(0, Span(0, 4))
    stream.grant(0, Span(0, 4))
    stream.grant(0, Span(0, 8))  # the first one and the next in one piece
    stream.grant(4, Span(4, 8))
    assert stream.granted == 8
    for positions in (range(4), range(4, 8)):
        expected = windows.batch(np.array(positions))
        np.testing.assert_array_equal(stream.next_batch(WAIT_S), expected)
    stream.grant(0, Span(0, 8))
    assert stream.next_batch(0.0) is None


def test_a_missing_grant_is_an_error(stream):
    stream.grant(0, Span(0, 4))
    with pytest.raises(ValueError, match=r"from sequence 8 on, but only 4"):
        stream.grant(8, Span(8, 12))
    assert stream.granted == 4


def test_a_waiting_loop_goes_on_with_the_grant(windows, stream):
    found = []
    taker = threading.Thread(target=lambda: found.append(stream.next_batch(WAIT_S)))
    taker.start()
    stream.grant(0, Span(0, 3))
    stream.grant(3, Span(3, 4))
    taker.join(WAIT_S)
    np.testing.assert_array_equal(found[0], windows.batch(np.arange(4)))


def test_close_frees_a_waiting_loop(stream):
    found = []
    taker = threading.Thread(target=lambda: found.append(stream.next_batch(WAIT_S)))
    taker.start()
    stream.close()
    taker.join(WAIT_S / 2)
    assert found == [None]


def test_few_batches_are_read_ahead(stream):
    stream.grant(0, Span(0, 400))
    assert stream.next_batch(WAIT_S) is not None
    assert len(stream._ready) == 2
