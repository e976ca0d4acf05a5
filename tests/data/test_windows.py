"""Every window once per epoch, every validation token once."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from diloco_jax.config import ConfigError
from diloco_jax.data.validation import ValidationBatches
from diloco_jax.data.windows import Windows


def text(size: int) -> np.ndarray:
    """Bytes of which any two neighbours tell where they are, below 62500."""
    i = np.arange(size)
    return np.where(i % 2, i // 2 % 250, i // 500).astype(np.uint8)


def window_set(windows: Windows, epoch: int) -> list[bytes]:
    n = len(windows)
    batch = windows.batch(np.arange(epoch * n, (epoch + 1) * n))
    return [row.astype(np.uint8).tobytes() for row in batch]


@hypothesis.given(st.integers(9, 400), st.integers(1, 8), st.integers(0, 2**31 - 1))
@hypothesis.settings(max_examples=20)
def test_an_epoch_is_a_permutation_of_all_windows(size, length, seed):
    tokens = text(size)
    windows = Windows(tokens, length, seed)
    expected = sorted(
        tokens[i * length : (i + 1) * length + 1].tobytes() for i in range(len(windows))
    )
    assert len(windows) == (size - 1) // length
    for epoch in (0, 1, 7):
        assert sorted(window_set(windows, epoch)) == expected


def test_order_depends_on_seed_and_epoch_alone():
    orders = [window_set(Windows(text(4000), 8, seed), 0) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    windows = Windows(text(4000), 8, 1)
    second = window_set(windows, 1)
    assert second != orders[0]
    assert window_set(windows, 0) == orders[0]


def test_a_batch_is_random_access():
    windows = Windows(text(4000), 8, 1)
    positions = np.array([3, 10**12, 4, 3], np.int64)
    batch = windows.batch(positions)
    assert batch.shape == (4, 9)
    assert batch.dtype == np.int32
    for row, position in zip(batch, positions, strict=True):
        np.testing.assert_array_equal(row, windows.batch(np.array([position]))[0])


def test_too_little_text_is_refused():
    with pytest.raises(ConfigError, match=r"8 bytes.*sequence_length = 8 takes 9"):
        Windows(text(8), 8, 0)
    assert len(Windows(text(9), 8, 0)) == 1
    with pytest.raises(ConfigError, match="validation text has 1 bytes"):
        ValidationBatches(text(1), 8, 2)


@hypothesis.given(st.integers(2, 400), st.integers(1, 9), st.integers(1, 5))
@hypothesis.settings(max_examples=40)
def test_validation_predicts_every_token_once(size, length, batch_size):
    tokens = text(size)
    batches = ValidationBatches(tokens, length, batch_size)
    predicted, inputs = [], []
    for i in range(len(batches)):
        batch = batches[i]
        assert batch.tokens.shape == (batch_size, length + 1)
        assert batch.weights.shape == (batch_size, length)
        predicted += batch.tokens[:, 1:][batch.weights == 1].tolist()
        inputs += batch.tokens[:, :-1][batch.weights == 1].tolist()
        assert batch.weights.any()
    assert predicted == tokens[1:].tolist()
    assert inputs == tokens[:-1].tolist()


class Watched:
    """Tokens that remember which of them were read."""

    def __init__(self, tokens):
        self.tokens, self.read = tokens, set()

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, wanted):
        self.read |= set(range(*wanted.indices(len(self))))
        return self.tokens[wanted]


@hypothesis.given(st.integers(2, 200), st.integers(1, 9), st.integers(1, 3))
@hypothesis.settings(max_examples=40)
def test_a_host_reads_its_own_rows_of_a_validation_alone(size, length, rows):
    tokens, batch_size = text(size), 3 * rows
    whole = ValidationBatches(tokens, length, batch_size)
    watched = Watched(tokens)
    part = ValidationBatches(watched, length, batch_size)
    # The first and the last third, the last one on two devices.
    own = [(0, rows), (2 * rows, 3 * rows), (2 * rows, 3 * rows)]
    part.read_only(own)
    needed = set()
    for i in range(len(whole)):
        for one, other in zip(whole[i], part[i], strict=True):
            assert other.shape == one.shape
            assert set(other.parts) == set(own)
            for start, stop in own:
                found = other.part((slice(start, stop), slice(None)))
                np.testing.assert_array_equal(found, one[start:stop])
                assert found.dtype == one.dtype
        for start, stop in own:
            first = (i * batch_size + start) * length
            needed |= set(range(first, first + (stop - start) * length + 1))
    assert watched.read == needed & set(range(size))


def test_spread_covers_the_text_evenly():
    batches = ValidationBatches(text(1001), 10, 10)
    assert len(batches) == 10
    assert batches.spread(4) == [0, 2, 5, 7]
    assert batches.spread(99) == list(range(10))
