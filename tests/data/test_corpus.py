"""The text found, its side of the split, and its windows: each once per epoch."""

import math
import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from diloco_jax.config import ConfigError
from diloco_jax.data.corpus import (
    ValidationWindows,
    Windows,
    is_validation,
    load_corpus,
)
from diloco_jax.data.loading import GlobalIndex
from diloco_jax.data.reader import ValidationBatches
from diloco_jax.data.source import TOKENS


def write(folder, names, text="text of {}"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(name))


def documents(tokens) -> list[bytes]:
    return tokens[:].tobytes().split(b"\0")[:-1]


def test_the_default_corpus_is_the_standard_library():
    corpus = load_corpus((), 0.02)
    assert len(corpus.train) > 4e6
    assert 2e4 < len(corpus.validation) < len(corpus.train) / 10
    assert "dataclasses.py" in corpus.names
    assert not any("site-packages" in n or "/test/" in n for n in corpus.names)
    assert load_corpus((), 0.02).digest == corpus.digest


def test_documents_are_split_whole_and_appear_once(tmp_path):
    names = [f"{folder}/{i}.txt" for folder in "ab" for i in range(100)]
    write(tmp_path, names)
    corpus = load_corpus((str(tmp_path),), 0.3)
    train, held = documents(corpus.train), documents(corpus.validation)
    assert sorted(train + held) == sorted(f"text of {n}".encode() for n in names)
    assert held == [
        f"text of {n}".encode() for n in sorted(names) if is_validation(n, 0.3)
    ]
    assert abs(len(held) / 200 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 200)


@pytest.mark.parametrize("fraction", [0.02, 0.0205, 0.3, 0.9])
def test_of_one_document_the_end_is_held_out(tmp_path, fraction):
    path = tmp_path / "all.txt"
    path.write_text("é" * 500)
    corpus = load_corpus((str(path),), fraction)
    (train,), (held,) = documents(corpus.train), documents(corpus.validation)
    assert train + held == path.read_bytes()
    assert set(held.decode()) == {"é"}, "cut between characters"
    assert 0 <= len(held) - 1000 * fraction < 2


def test_where_no_document_is_held_out_the_end_of_each_is(tmp_path):
    names = [f"{i}.txt" for i in range(3)]
    assert not any(is_validation(name, 0.02) for name in names)
    write(tmp_path, names, "ten " * 25 + "{}")
    corpus = load_corpus((str(tmp_path),), 0.02)
    assert [len(d) for d in documents(corpus.validation)] == [3, 3, 3]
    assert [d[-5:] for d in documents(corpus.validation)] == [
        name[-3:].encode() for name in names
    ]
    assert len(documents(corpus.train)) == 3


def test_a_name_that_is_no_text_is_refused(tmp_path):
    (tmp_path / os.fsdecode(b"bad\xff.txt")).write_text("text")
    with pytest.raises(ConfigError, match=r"bad.*is not UTF-8.*rename it"):
        load_corpus((str(tmp_path),), 0.5)


def test_links_to_folders_are_told_and_left_out(tmp_path, caplog):
    write(tmp_path, ["here/a.txt", "there/b.txt"])
    (tmp_path / "here/link").symlink_to(tmp_path / "there")
    corpus = load_corpus((str(tmp_path / "here"),), 0.5)
    assert corpus.names == ("a.txt",)
    assert f"{tmp_path}/here/link is a link to a folder" in caplog.text


def test_a_new_document_moves_no_other(tmp_path):
    write(tmp_path, [f"{i}.txt" for i in range(50)])
    before = load_corpus((str(tmp_path),), 0.3)
    write(tmp_path, [f"{i}.txt" for i in range(50, 100)])
    after = load_corpus((str(tmp_path),), 0.3)
    assert set(documents(before.train)) <= set(documents(after.train))
    assert set(documents(before.validation)) <= set(documents(after.validation))
    assert before.digest != after.digest


def test_the_digest_is_of_names_and_contents_not_of_places(tmp_path):
    for place in ("here", "there"):
        write(tmp_path / place, ["one.txt", "sub/two.txt"])
    here, there = (load_corpus((str(tmp_path / p),), 0.5) for p in ("here", "there"))
    assert here.digest == there.digest
    (tmp_path / "there/one.txt").rename(tmp_path / "there/three.txt")
    assert load_corpus((str(tmp_path / "there"),), 0.5).digest != here.digest
    (tmp_path / "here/one.txt").write_text("text of another")
    assert load_corpus((str(tmp_path / "here"),), 0.5).digest != here.digest


def test_hidden_and_repeated_files_count_once(tmp_path):
    write(tmp_path, ["a.txt", ".git/config", ".hidden"])
    corpus = load_corpus((str(tmp_path), str(tmp_path / "a.txt")), 0.5)
    assert corpus.names == ("a.txt",)


def test_two_files_of_one_name_are_refused(tmp_path):
    write(tmp_path, ["x/a.txt", "y/a.txt"])
    with pytest.raises(ConfigError, match=r"x/a.txt and .*y/a.txt"):
        load_corpus((str(tmp_path / "x"), str(tmp_path / "y")), 0.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b"", "is empty"),
        (b"abc\0def", "NUL byte at offset 3"),
        ("gr\u00fcn".encode("latin-1") + b" is green", "not UTF-8 at offset 2"),
        (b"ab\xffcd\0", "not UTF-8 at offset 2"),
        (b"a\0b\xff", "NUL byte at offset 1"),
    ],
)
def test_a_path_that_is_no_text_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "corpus.bin"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"corpus\.bin.*{message}"):
        load_corpus((str(path),), 0.5)
    (tmp_path / "empty").mkdir()
    for other, said in (
        ("x" * 300, r"does not exist \(File name too long\)"),
        (str(tmp_path / "empty"), "is empty"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_corpus((other,), 0.5)


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


def test_the_order_is_the_one_that_runs_have_been_recorded_with():
    rows = GlobalIndex(Windows(text(4000), 8), seed=3)
    found = [int(rows[p]["tokens"][1]) for p in (0, 1, 2, 498, 499, 10**12)]
    assert found == [166, 20, 118, 120, 158, 162]


def test_parts_of_a_text_are_cut_anywhere():
    first, second = Windows(text(41), 4).parts(2)
    assert (len(first), len(second)) == (5, 4)
    np.testing.assert_array_equal(second[0]["tokens"], text(41)[21:26])


def test_too_little_text_is_refused():
    with pytest.raises(ConfigError, match=r"8 tokens.*sequence_length = 8 takes 9"):
        Windows(text(8), 8)
    assert len(Windows(text(9), 8)) == 1
    with pytest.raises(ConfigError, match="validation text has 1 tokens"):
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


class Watched(ValidationWindows):
    """Windows that remember which of them were read."""

    def __getitem__(self, row):
        self.read.add(row)
        return super().__getitem__(row)


@hypothesis.given(st.integers(2, 200), st.integers(1, 9), st.integers(1, 3))
@hypothesis.settings(max_examples=40)
def test_a_host_reads_its_own_rows_of_a_validation_alone(size, length, rows):
    whole = validation(text(size), length, 3 * rows)
    source = Watched(text(size), length)
    source.read = set()
    part = ValidationBatches(source, 3 * rows, FIELDS, length)
    # The first and the last third, the last one on two devices.
    own = [(0, rows), (2 * rows, 3 * rows), (2 * rows, 3 * rows)]
    part.read_only(own)
    for i in range(len(whole)):
        for name, one in whole[i].items():
            other = part[i][name]
            assert (other.shape, set(other.parts)) == (one.shape, set(own))
            for start, stop in own:
                found = other.part((slice(start, stop), slice(None)))
                np.testing.assert_array_equal(found, one[start:stop])
                assert found.dtype == one.dtype
    assert {row // rows % 3 for row in source.read} <= {0, 2}


def test_spread_covers_the_text_evenly():
    batches = validation(text(1001), 10, 10)
    assert len(batches) == 10
    assert batches.spread(4) == [0, 2, 5, 7]
    assert batches.spread(99) == list(range(10))
