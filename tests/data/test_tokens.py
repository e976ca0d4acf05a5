"""Token files: contents that are read, and files that are refused."""

import errno
import io

import numpy as np
import pytest

from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    RunConfig,
)
from diloco_jax.config.resolving import resolve
from diloco_jax.data.corpus import TokenRow, is_validation, load_corpus
from diloco_jax.data.loading import load_data


def save(folder, lengths, dtype=np.uint16):
    """Files 0.npy, 1.npy, ...; every token is another one."""
    first = 0
    for number, length in enumerate(lengths):
        np.save(folder / f"{number}.npy", np.arange(first, first + length, dtype=dtype))
        first += length
    return (str(folder),)


@pytest.fixture(params=["mapped", "read"], autouse=True)
def kind(request, monkeypatch):
    from_size = 0 if request.param == "mapped" else 1 << 30
    monkeypatch.setattr("diloco_jax.data.documents.MAPPED_FROM", from_size)


def test_a_row_is_read_as_if_it_were_one_array():
    parts = [np.arange(3), np.arange(3, 3), np.arange(3, 10)]
    row, whole = TokenRow(parts), np.arange(10)
    assert len(row) == 10
    for start in range(12):
        for stop in range(12):
            np.testing.assert_array_equal(row[start:stop], whole[start:stop])
    assert len(TokenRow([])) == len(TokenRow([])[0:3]) == 0


def test_every_token_is_on_one_side(tmp_path):
    names = [f"{number}.npy" for number in range(60)]
    corpus = load_corpus(save(tmp_path, [50] * 60), 0.2)
    assert corpus.names == tuple(sorted(names))
    assert (corpus.largest, corpus.of_bytes) == (60 * 50 - 1, False)
    held = sum(50 for name in names if is_validation(name, 0.2))
    assert 0 < len(corpus.validation) == held
    both = np.concatenate([corpus.train[:], corpus.validation[:]])
    assert sorted(both) == list(range(60 * 50))


def test_the_digest_is_of_names_and_tokens(tmp_path):
    def digest(folder, **changes):
        (tmp_path / folder).mkdir()
        return load_corpus(save(tmp_path / folder, **changes), 0.1).digest

    first = digest("a", lengths=[10, 20])
    assert digest("b", lengths=[10, 20]) == first
    others = {digest("c", lengths=[20, 10]), digest("d", lengths=[30])}
    assert len({first, *others}) == 3


def test_too_little_for_both_sides_is_refused(tmp_path):
    run = RunConfig(data=DataConfig(paths=save(tmp_path, [1])), sequence_length=16)
    with pytest.raises(ConfigError, match=r"has [01] tokens"):
        resolve(Config(run=run, islands={"a": IslandConfig()}))


def test_files_beyond_those_that_may_be_open_are_told(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.EMFILE, "Too many open files")

    paths = save(tmp_path, [10])
    for name in ("open_memmap", "read_array"):
        monkeypatch.setattr(np.lib.format, name, full)
    with pytest.raises(
        ConfigError, match=r"0\.npy is one file too many .* raise `ulimit -n`"
    ):
        load_corpus(paths, 0.1)


@pytest.mark.parametrize(
    ("array", "shown"),
    [
        (np.zeros((2, 3), np.int32), r"shape \(2, 3\) and type int32"),
        (np.zeros(3), "type float64; tokens are one row of integers"),
        (np.array([1, -2]), "has -2 as a token"),
        (np.array([2**31]), "has 2147483648 as a token"),
        (np.array([object()]), "cannot be read as an array of numpy"),
        (np.zeros(0, np.int32), "no tokens in 0.npy"),
    ],
)
def test_what_is_no_row_of_tokens_is_refused(tmp_path, array, shown):
    np.save(tmp_path / "0.npy", array)
    with pytest.raises(ConfigError, match=shown):
        load_corpus((str(tmp_path),), 0.1)


def saved(save_as=np.save, *, cut=None):
    """The bytes of a file of numpy."""
    file = io.BytesIO()
    save_as(file, np.zeros(1000, np.int32))
    return file.getvalue()[:cut]


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04 no archive",
        b"\x93NUMPY\x01\x00v\x00{'descr' (" + b" " * 107,
        saved(np.savez),
        saved(cut=-100),
    ],
)
def test_what_only_begins_as_numpys_files_do_is_refused(tmp_path, content):
    (tmp_path / "0.npy").write_bytes(content)
    with pytest.raises(ConfigError, match=r"0\.npy cannot be read as an array"):
        load_corpus((str(tmp_path),), 0.1)


def test_text_beside_tokens_is_refused(tmp_path):
    save(tmp_path, [100])
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"0.npy has tokens, and .*a.txt is text"):
        load_corpus((str(tmp_path),), 0.1)


def test_a_loss_of_tokens_has_no_bits_per_byte(tmp_path):
    data = DataConfig(paths=save(tmp_path, [1000]))
    assert load_data(RunConfig(data=data, sequence_length=16)).bytes_per_token is None
