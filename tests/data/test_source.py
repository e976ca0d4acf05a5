"""A model gets the arrays that it asks for, and no data that it would misread."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.data.loading import Data, GlobalIndex, Mixture, require_vocabulary
from diloco_jax.data.reader import BatchReader, ValidationBatches
from diloco_jax.data.source import (
    MOST_SLOTS,
    SEGMENTS,
    TOKENS,
    WEIGHTS,
    Field,
    Numbered,
    RowRange,
    Shares,
    Together,
    fields_of_batch,
    slots_of,
)

T = 4
PLAIN = {"tokens": TOKENS}
PICTURE = Field("uint8", None, (3, 3))
MASKED = {**PLAIN, "segments": SEGMENTS._replace(optional=True)}


class Rows:
    """Rows that tell their number; `lacking`: an array that they turn out without."""

    def __init__(self, fields, count=7, lacking=""):
        self.fields, self._count, self._lacking = fields, count, lacking

    def __len__(self):
        return self._count

    def __getitem__(self, row):
        assert 0 <= row < self._count
        return {
            name: np.full(field.shape_of(T), row, field.dtype)
            for name, field in self.fields.items()
            if name != self._lacking
        }


@pytest.mark.parametrize(
    ("asked", "arrays", "found"),
    [
        (PLAIN, ["tokens"], ["tokens"]),
        (PLAIN, ["tokens", "source"], ["tokens"]),
        (PLAIN, ["tokens", "weights"], ["tokens", "weights"]),
        (MASKED, ["tokens"], ["tokens"]),
        (MASKED, ["tokens", "segments"], ["tokens", "segments"]),
        ({**PLAIN, "segments": SEGMENTS}, ["tokens"], ["tokens", "segments"]),
        ({**PLAIN, "weights": WEIGHTS}, ["tokens"], ["tokens", "weights"]),
        ({**PLAIN, "image": PICTURE}, ["tokens", "image"], ["tokens", "image"]),
    ],
)
def test_a_batch_has_what_both_sides_know(asked, arrays, found):
    assert list(fields_of_batch(asked, arrays)) == found


def test_packed_data_is_not_for_a_model_that_knows_no_documents():
    with pytest.raises(ConfigError) as refused:
        fields_of_batch({**PLAIN, "image": PICTURE}, ["tokens", "segments", "image"])
    for said in ("data.arrays = image, segments, tokens", "its batch is image, tokens"):
        assert said in str(refused.value)
    assert "not packed" in str(refused.value)


def test_what_a_model_needs_and_nobody_can_derive_is_asked_of_the_data():
    with pytest.raises(ConfigError) as refused:
        fields_of_batch({**PLAIN, "image": PICTURE}, ["tokens"])
    for said in ("'image', uint8[3, 3]", "has tokens (data.arrays)", "data.paths"):
        assert said in str(refused.value)


def test_weights_and_segments_are_ones_where_the_data_lacks_them():
    fields = {**PLAIN, "segments": SEGMENTS, "weights": WEIGHTS}
    batch = BatchReader(Rows(PLAIN), fields, T).batch(np.array([5, 2]))
    assert batch["tokens"].tolist() == [[5] * 5, [2] * 5]
    assert batch["segments"].tolist() == [[1] * 5] * 2
    assert batch["weights"].tolist() == [[1.0] * 4] * 2
    assert {name: array.dtype.name for name, array in batch.items()} == {
        "tokens": "int32",
        "segments": "int32",
        "weights": "float32",
    }


def test_arrays_of_another_shape_are_refused_with_both():
    other = {**PLAIN, "image": PICTURE._replace(shape=(3, 4))}
    with pytest.raises(ConfigError, match=r"uint8\[3, 4\] .*takes uint8\[3, 3\]"):
        BatchReader(Rows(other), {**PLAIN, "image": PICTURE}, T)
    longer = {"tokens": TOKENS._replace(beyond=2)}
    with pytest.raises(ConfigError, match=r"int32\[T \+ 2\] .*takes int32\[T \+ 1\]"):
        BatchReader(Rows(longer), PLAIN, T)
    with pytest.raises(ConfigError, match="have nothing as 'image'"):
        BatchReader(Rows(PLAIN), {**PLAIN, "image": PICTURE}, T)


def test_a_row_that_is_not_as_its_source_says_is_an_error():
    fields = {**PLAIN, "weights": WEIGHTS}
    reader = BatchReader(Rows(fields, lacking="weights"), fields, T)
    with pytest.raises(ValueError, match="row 3 has no 'weights'"):
        reader.batch(np.array([3]))
    rows = Rows(PLAIN)
    reader = BatchReader(rows, PLAIN, T)
    rows.fields = {"tokens": TOKENS._replace(beyond=3)}
    with pytest.raises(
        ValueError, match=r"\(7,\) as shape of 'tokens', .* says \(5,\)"
    ):
        reader.batch(np.array([3]))


def test_a_hole_in_a_source_is_named_where_it_is_drawn():
    rows = [None, None]
    source = RowRange(Rows(PLAIN), 0, 2)
    source._source = rows
    with pytest.raises(ConfigError, match=r"row [01] is None: a filter leaves holes"):
        GlobalIndex(source, 0)[0]
    reader = BatchReader(Rows(PLAIN), PLAIN, T)
    reader._rows = rows
    with pytest.raises(ConfigError, match=r"row 1 is None"):
        reader.batch(np.array([1]))


def test_rows_that_fill_up_a_validation_count_for_nothing():
    rows = Rows({**PLAIN, "segments": SEGMENTS}, count=5)
    batches = ValidationBatches(rows, 3, rows.fields, T)
    assert len(batches) == 2
    assert list(batches[0]) == ["tokens", "segments", "weights"]
    assert batches[0]["weights"].tolist() == [[1.0] * 4] * 3
    last = batches[1]
    assert last["tokens"].tolist() == [[3] * 5, [4] * 5, [0] * 5]
    assert last["segments"].tolist() == [[3] * 5, [4] * 5, [0] * 5]
    assert last["weights"].tolist() == [[1.0] * 4, [1.0] * 4, [0.0] * 4]
    assert batches.repeated(2)["tokens"].tolist() == [[0] * 5, [1] * 5, [0] * 5]


def test_data_knows_its_arrays_in_order():
    rows = Rows({"weights": WEIGHTS, "tokens": TOKENS, "segments": SEGMENTS})
    data = Data(
        train=rows,
        validation=RowRange(rows, 0, 2),
        digest="",
        largest=300,
        bytes_per_token=None,
    )
    assert data.arrays == ("segments", "tokens", "weights")
    parts = data.parts(3)
    assert [
        [int(part[i]["tokens"][0]) for i in range(len(part))] for part in parts
    ] == [[0, 1, 2], [3, 4], [5, 6]]
    with pytest.raises(ConfigError, match=r"vocab_size = 256, .* up to 300; .* 301"):
        require_vocabulary(data, RunConfig())


# ---- mixtures: every position is one row of one source, in the shares that were asked

PARTS = st.lists(st.integers(1, 40), min_size=1, max_size=7)


def numbered(*counts):
    """Sources of so many rows, which say which they are."""
    return [Numbered(Rows(PLAIN, rows), n) for n, rows in enumerate(counts)]


def drawn(mixture, positions):
    rows = (mixture[position] for position in positions)
    return [(int(row["source_number"]), int(row["tokens"][0])) for row in rows]


@given(PARTS, st.data())
def test_shares_are_those_of_the_weights(weights, data):
    shares, total = Shares(weights), sum(weights)
    counts = np.zeros(len(weights))
    deviations = []
    for position in range(2 * shares.period):
        counts[shares.draw(position)[0]] += 1
        deviations.append(counts - (position + 1) * np.array(weights) / total)
    deviations = np.array(deviations)
    # From the first position on: less than one row off, in any window than two.
    assert np.abs(deviations).max() < 1
    assert (deviations.max(axis=0) - deviations.min(axis=0)).max() < 2
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, 3 * shares.period)] * 2)))
    found = Counter(shares.draw(p)[0] for p in range(a, b))
    assert shares.drawn(a, b) == [found[s] for s in range(len(weights))]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=3),
    st.integers(0, 99),
)
@settings(max_examples=8)
def test_each_row_is_drawn_once_in_each_epoch_of_its_source(sources, seed):
    weights, rows = zip(*sources, strict=True)
    shares = Shares(weights)
    mixture = Mixture(numbered(*rows), shares, seed)
    found = drawn(mixture, range(3 * max(rows) * shares.period))
    for source, count in enumerate(rows):
        mine = [row for s, row in found if s == source]
        epochs = [mine[i : i + count] for i in range(0, len(mine), count)]
        assert len(epochs) >= 3
        assert all(sorted(epoch) == list(range(count)) for epoch in epochs[:-1])
        assert len(set(epochs[-1])) == len(epochs[-1])
    # Reading in another order, or by others, changes nothing.
    other = Mixture(numbered(*rows), shares, seed)
    assert drawn(other, reversed(range(len(found)))) == found[::-1]


def test_a_source_begins_anew_in_another_order_and_with_another_seed():
    def orders(seed):
        sources = numbered(50, 50)
        found = drawn(Mixture(sources, Shares([1, 1]), seed), range(200))
        mine = [[r for s, r in found if s == source] for source in (0, 1)]
        return [tuple(part) for rows in mine for part in (rows[:50], rows[50:])]

    assert len(set(orders(0) + orders(1)[:1])) == 5


def test_weights_become_whole_numbers():
    assert slots_of([0.7, 0.3]) == (7, 3)
    assert slots_of([2, 4, 6]) == (1, 2, 3)
    assert slots_of([5.0]) == (1,)
    large = slots_of([123_456_789, 987_654_321, 55_555_555])
    assert sum(large) == MOST_SLOTS
    exact = np.array([123_456_789, 987_654_321, 55_555_555]) / 1_166_666_665
    assert np.abs(np.array(large) - exact * MOST_SLOTS).max() < 1
    with pytest.raises(ValueError, match="weight 1 is less than 1 in 10000 of their"):
        slots_of([1, 100_000])


def test_sources_together_are_their_rows_in_order():
    together = Together(numbered(3, 1, 2))
    want = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1)]
    assert drawn(together, range(len(together))) == want
    with pytest.raises(IndexError, match="row 6 of 6"):
        together[6]
