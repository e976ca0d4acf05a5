"""Leases in, batches out, each position once and in order."""

import threading

import numpy as np
import pytest

from diloco_jax.data.stream import LeasedStream
from diloco_jax.data.windows import Windows
from diloco_jax.protocol.values import Span

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
    stream.grant(Span(100, 106))
    stream.grant(Span(300, 301))
    stream.grant(Span(50, 56))
    drawn = [*range(100, 106), 300, *range(50, 56)]
    for step in range(3):
        expected = windows.batch(np.array(drawn[4 * step : 4 * step + 4]))
        np.testing.assert_array_equal(stream.next_batch(WAIT_S), expected)
    assert (stream.granted, stream.consumed) == (13, 12)
    assert not stream.ready


def test_leases_that_do_not_fill_a_batch_are_no_batch(stream):
    stream.grant(Span(0, 3))
    assert not stream.ready
    with pytest.raises(ValueError, match="3 sequences are leased, a step takes 4"):
        stream.next_batch(WAIT_S)
    stream.grant(Span(3, 4))
    assert stream.ready


def test_a_batch_that_cannot_be_read_is_an_error(stream, windows, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(windows, "batch", lambda positions: never.wait(WAIT_S))
    stream.grant(Span(0, 4))
    with pytest.raises(TimeoutError, match=r"4 sequences was not read within 0\.01 s"):
        stream.next_batch(0.01)
    never.set()


def test_few_batches_are_read_ahead(stream):
    stream.grant(Span(0, 400))
    stream.next_batch(WAIT_S)
    assert len(stream._ready) == 2
