"""The text found, and its side of the split."""

import math
import os

import numpy as np
import pytest

from diloco_jax.config import ConfigError
from diloco_jax.data.corpus import is_validation, load_corpus
from diloco_jax.data.tokenizers import decode_bytes, encode_bytes


def write(folder, names, text="text of {}"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(name))


def documents(tokens: np.ndarray) -> list[bytes]:
    return tokens.tobytes().split(b"\0")[:-1]


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


def test_a_path_that_is_too_long_is_refused():
    with pytest.raises(ConfigError, match=r"does not exist \(File name too long\)"):
        load_corpus(("x" * 300,), 0.5)


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is empty"):
        load_corpus((str(tmp_path),), 0.5)


def test_tokens_are_bytes():
    text = "def f():\n    return 'gr\u00fcn'\n"
    assert encode_bytes(text).tolist() == list(text.encode())
    assert decode_bytes(encode_bytes(text)) == text
    assert decode_bytes(np.array([97, 0, 98, 0xFF])) == "a\nb\ufffd"
