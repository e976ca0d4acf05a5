"""Leases in, batches out, each position once and in order."""

import threading

import numpy as np
import pytest

from diloco_jax.data import reader as batch_reader
from diloco_jax.data.corpus import Windows
from diloco_jax.data.loading import GlobalIndex
from diloco_jax.data.reader import BatchReader, LeasedStream
from diloco_jax.data.source import TOKENS, Field
from diloco_jax.protocol.messages import Span

TEXT = np.random.default_rng(0).integers(1, 256, 5000).astype(np.uint8)
FIELDS = {"tokens": TOKENS, "picture": Field("uint8", None, (2, 3))}
WAIT_S = 20.0


class Illustrated:
    """Windows with a picture each, read by way of `read`, which a test replaces."""

    fields = FIELDS

    def __init__(self, windows):
        self.windows = windows

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, row):
        return self.read(row)

    def read(self, row):
        picture = np.full((2, 3), row % 251, np.uint8)
        return {**self.windows[row], "picture": picture}


@pytest.fixture
def source():
    return Illustrated(Windows(TEXT, 8))


@pytest.fixture
def reader(source):
    return BatchReader(GlobalIndex(source, seed=0), FIELDS, 8)


@pytest.fixture
def stream(reader):
    stream = LeasedStream(reader, sequences_per_step=4)
    yield stream
    stream.close()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def test_batches_are_the_granted_positions_in_order(reader, stream):
    stream.grant(Span(100, 106))
    stream.grant(Span(300, 301))
    stream.grant(Span(50, 56))
    drawn = [*range(100, 106), 300, *range(50, 56)]
    for step in range(3):
        expected = reader.batch(np.array(drawn[4 * step : 4 * step + 4]))
        assert expected["picture"].shape == (4, 2, 3)
        assert_equal(stream.next_batch(WAIT_S), expected)
    assert not stream.ready


def test_leases_that_do_not_fill_a_batch_are_no_batch(stream):
    stream.grant(Span(0, 3))
    assert not stream.ready
    with pytest.raises(ValueError, match="3 sequences are leased, a step takes 4"):
        stream.next_batch(WAIT_S)
    stream.grant(Span(3, 4))
    assert stream.ready


def test_a_batch_that_cannot_be_read_is_an_error(stream, source, monkeypatch):
    never = threading.Event()
    monkeypatch.setattr(source, "read", lambda row: never.wait(WAIT_S))
    stream.grant(Span(0, 4))
    with pytest.raises(TimeoutError, match=r"4 sequences was not read within 0\.01 s"):
        stream.next_batch(0.01)
    never.set()


@pytest.mark.parametrize(("megabytes", "ahead"), [(1024, 16), (0.0005, 3), (0, 2)])
def test_as_many_batches_are_read_ahead_as_memory_affords(
    reader, megabytes, ahead, monkeypatch
):
    monkeypatch.setattr(batch_reader, "AHEAD_BYTES", int(megabytes * 2**20))
    stream = LeasedStream(reader, sequences_per_step=4)
    stream.grant(Span(0, 400))
    stream.next_batch(WAIT_S)
    assert len(stream._ready) == ahead
    stream.close()


def test_a_host_reads_its_own_rows_alone(source, reader, monkeypatch):
    read, whole = [], source.read
    monkeypatch.setattr(source, "read", lambda row: read.append(row) or whole(row))
    stream = LeasedStream(reader, sequences_per_step=4)
    stream.read_only([(1, 2), (3, 4), (1, 2)])
    stream.grant(Span(100, 104))
    batch = stream.next_batch(WAIT_S)
    stream.close()
    assert len(read) == 2
    assert {name: array.shape for name, array in batch.items()} == {
        "tokens": (4, 9),
        "picture": (4, 2, 3),
    }
    columns = slice(None)
    for row in (1, 3):
        for name, expected in reader.batch(np.array([100 + row])).items():
            part = batch[name].part((slice(row, row + 1), columns))
            np.testing.assert_array_equal(part, expected)
    with pytest.raises(KeyError):
        batch["tokens"].part((slice(0, 1), columns))


def test_rows_of_one_batch_are_read_side_by_side(source, reader, monkeypatch):
    monkeypatch.setattr(batch_reader, "ROWS_AT_ONCE", 1)
    monkeypatch.setattr(batch_reader.machine, "cores", lambda: 4)
    together, whole = threading.Barrier(4), source.read

    def wait_and_read(row):
        together.wait(WAIT_S)  # None is read before all have begun.
        return whole(row)

    monkeypatch.setattr(source, "read", wait_and_read)
    stream = LeasedStream(reader, sequences_per_step=4)
    stream.grant(Span(0, 4))
    assert stream.next_batch(WAIT_S)["tokens"].shape == (4, 9)
    stream.close()


def test_a_row_that_does_not_read_is_the_loops_error(source, reader, monkeypatch):
    def broken(row):
        raise OSError("the disk is gone")

    monkeypatch.setattr(source, "read", broken)
    stream = LeasedStream(reader, sequences_per_step=4)
    stream.grant(Span(0, 4))
    with pytest.raises(OSError, match="the disk is gone"):
        stream.next_batch(WAIT_S)
    stream.close()
