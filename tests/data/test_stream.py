"""Leases in, batches out, each position once and in order."""

import threading

import numpy as np
import pytest

from diloco_jax.data import stream as data_stream
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
    monkeypatch.setattr(windows, "window", lambda position: never.wait(WAIT_S))
    stream.grant(Span(0, 4))
    with pytest.raises(TimeoutError, match=r"4 sequences was not read within 0\.01 s"):
        stream.next_batch(0.01)
    never.set()


@pytest.mark.parametrize(("megabytes", "ahead"), [(1024, 16), (0.0005, 3), (0, 2)])
def test_as_many_batches_are_read_ahead_as_memory_affords(
    windows, megabytes, ahead, monkeypatch
):
    monkeypatch.setattr(data_stream, "AHEAD_BYTES", int(megabytes * 2**20))
    stream = LeasedStream(windows, sequences_per_step=4)
    stream.grant(Span(0, 400))
    stream.next_batch(WAIT_S)
    assert len(stream._ready) == ahead
    stream.close()


def test_a_host_reads_its_own_rows_alone(windows, monkeypatch):
    read, window = [], windows.window
    monkeypatch.setattr(windows, "window", lambda p: read.append(p) or window(p))
    stream = LeasedStream(windows, sequences_per_step=4)
    stream.read_only([(1, 2), (3, 4), (1, 2)])
    stream.grant(Span(100, 104))
    batch = stream.next_batch(WAIT_S)
    stream.close()
    assert sorted(read) == [101, 103]
    assert batch.shape == (4, 9)
    columns = slice(None)
    for row in (1, 3):
        part = batch.part((slice(row, row + 1), columns))
        np.testing.assert_array_equal(part, windows.batch(np.array([100 + row])))
    with pytest.raises(KeyError):
        batch.part((slice(0, 1), columns))


def test_rows_of_one_batch_are_read_side_by_side(windows, monkeypatch):
    monkeypatch.setattr(data_stream, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(data_stream.machine, "cores", lambda: 4)
    together, window = threading.Barrier(4), windows.window

    def wait_and_read(position):
        together.wait(WAIT_S)  # None is read before all have begun.
        return window(position)

    monkeypatch.setattr(windows, "window", wait_and_read)
    stream = LeasedStream(windows, sequences_per_step=4)
    stream.grant(Span(0, 4))
    assert stream.next_batch(WAIT_S).shape == (4, 9)
    stream.close()


def test_a_window_that_does_not_read_is_the_loops_error(windows, monkeypatch):
    def broken(position):
        raise OSError("the disk is gone")

    monkeypatch.setattr(windows, "window", broken)
    stream = LeasedStream(windows, sequences_per_step=4)
    stream.grant(Span(0, 4))
    with pytest.raises(OSError, match="the disk is gone"):
        stream.next_batch(WAIT_S)
    stream.close()
