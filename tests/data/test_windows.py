"""Every window once per epoch, every validation token once."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from diloco_jax.config import ConfigError
from diloco_jax.data.batches import ValidationBatches
from diloco_jax.data.corpus import ValidationWindows, Windows
from diloco_jax.data.loading import GlobalIndex
from diloco_jax.data.source import TOKENS, RowRange

FIELDS = {"tokens": TOKENS}


def text(size: int) -> np.ndarray:
    """Bytes of which any two neighbours tell where they are, below 62500."""
    i = np.arange(size)
    return np.where(i % 2, i // 2 % 250, i // 500).astype(np.uint8)


def row_set(source, seed: int, epoch: int) -> list[bytes]:
    n, rows = len(source), GlobalIndex(source, seed)
    found = [rows[position]["tokens"] for position in range(epoch * n, (epoch + 1) * n)]
    return [row.astype(np.uint8).tobytes() for row in found]


@hypothesis.given(st.integers(9, 400), st.integers(1, 8), st.integers(0, 2**31 - 1))
@hypothesis.settings(max_examples=20)
def test_an_epoch_is_a_permutation_of_all_windows(size, length, seed):
    tokens = text(size)
    windows = Windows(tokens, length)
    expected = sorted(
        tokens[i * length : (i + 1) * length + 1].tobytes() for i in range(len(windows))
    )
    assert len(windows) == (size - 1) // length
    for epoch in (0, 1, 7):
        assert sorted(row_set(windows, seed, epoch)) == expected


def test_order_depends_on_seed_and_epoch_alone():
    orders = [row_set(Windows(text(4000), 8), seed, 0) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    windows = Windows(text(4000), 8)
    second = row_set(windows, 1, 1)
    assert second != orders[0]
    assert row_set(windows, 1, 0) == orders[0]


def test_the_order_is_the_one_that_runs_have_been_recorded_with():
    rows = GlobalIndex(Windows(text(4000), 8), seed=3)
    found = [int(rows[p]["tokens"][1]) for p in (0, 1, 2, 498, 499, 10**12)]
    assert found == [166, 20, 118, 120, 158, 162]


def test_a_part_of_a_source_has_its_own_rows():
    windows = Windows(text(4000), 8)
    part = RowRange(windows, 100, 103)
    assert len(part) == 3
    assert sorted(row_set(part, 0, 0)) == sorted(
        windows[row]["tokens"].astype(np.uint8).tobytes() for row in (100, 101, 102)
    )


def test_parts_of_a_text_are_cut_anywhere():
    first, second = Windows(text(41), 4).parts(2)
    assert (len(first), len(second)) == (5, 4)
    np.testing.assert_array_equal(second[0]["tokens"], text(41)[21:26])


def test_too_little_text_is_refused():
    with pytest.raises(ConfigError, match=r"8 bytes.*sequence_length = 8 takes 9"):
        Windows(text(8), 8)
    assert len(Windows(text(9), 8)) == 1
    with pytest.raises(ConfigError, match="validation text has 1 bytes"):
        ValidationWindows(text(1), 8)


def validation(tokens, length: int, batch_size: int) -> ValidationBatches:
    source = ValidationWindows(tokens, length)
    return ValidationBatches(source, batch_size, FIELDS, length)


@hypothesis.given(st.integers(2, 400), st.integers(1, 9), st.integers(1, 5))
@hypothesis.settings(max_examples=40)
def test_validation_predicts_every_token_once(size, length, batch_size):
    tokens = text(size)
    batches = validation(tokens, length, batch_size)
    predicted, inputs = [], []
    for i in range(len(batches)):
        batch = batches[i]
        assert batch["tokens"].shape == (batch_size, length + 1)
        assert batch["weights"].shape == (batch_size, length)
        counts = batch["weights"] == 1
        predicted += batch["tokens"][:, 1:][counts].tolist()
        inputs += batch["tokens"][:, :-1][counts].tolist()
        assert counts.any()
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
    whole = validation(tokens, length, batch_size)
    watched = Watched(tokens)
    part = validation(watched, length, batch_size)
    # The first and the last third, the last one on two devices.
    own = [(0, rows), (2 * rows, 3 * rows), (2 * rows, 3 * rows)]
    part.read_only(own)
    needed = set()
    for i in range(len(whole)):
        for name, one in whole[i].items():
            other = part[i][name]
            assert other.shape == one.shape
            assert set(other.parts) == set(own)
            for start, stop in own:
                found = other.part((slice(start, stop), slice(None)))
                np.testing.assert_array_equal(found, one[start:stop])
                assert found.dtype == one.dtype
        for start, stop in own:
            first = (i * batch_size + start) * length
            if first < size - 1:
                needed |= set(range(first, first + (stop - start) * length + 1))
    assert watched.read == needed & set(range(size))


def test_spread_covers_the_text_evenly():
    batches = validation(text(1001), 10, 10)
    assert len(batches) == 10
    assert batches.spread(4) == [0, 2, 5, 7]
    assert batches.spread(99) == list(range(10))
