"""A large file of text is read once; its row is the text as if it had been read."""

import errno
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from diloco_jax.config import Config, ConfigError, DataConfig, IslandConfig, RunConfig
from diloco_jax.config.resolving import resolve
from diloco_jax.data import corpus, manifest
from diloco_jax.data.commands import manifest_command
from diloco_jax.data.corpus import load_corpus
from diloco_jax.data.documents import SourceKind, read_file
from diloco_jax.observability import terminal

CHUNK = 64
WAIT_S = 60.0
LARGE = 1000
"""Bytes from which a file is large in these tests."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(manifest, "MAPPED_FROM", LARGE)
    monkeypatch.setattr(manifest, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number, length in enumerate((30, LARGE, 3 * LARGE, 17, LARGE)):
        (folder / f"{number}.txt").write_text(chr(97 + number) * (length - 2) + "é")
    return folder


@pytest.fixture
def reads(monkeypatch):
    """Sizes of the chunks that are read."""
    sizes, digest = [], manifest._digest
    monkeypatch.setattr(
        manifest, "_digest", lambda chunk: sizes.append(len(chunk)) or digest(chunk)
    )
    return sizes


def copied(path):
    """Changes the time of a file, as a copy does."""
    os.utime(path, ns=(1, 1))


def test_large_and_small_documents_make_one_row(folder, monkeypatch):
    mapped = load_corpus((str(folder),), 0.3)
    monkeypatch.setattr(manifest, "MAPPED_FROM", 1 << 30)
    for path in folder.glob("*.manifest"):
        path.unlink()
    read = load_corpus((str(folder),), 0.3)
    for one, other in (
        (mapped.train, read.train),
        (mapped.validation, read.validation),
    ):
        np.testing.assert_array_equal(one[: len(one)], other[: len(other)])
    # The digest takes a large file's own digest: sizes decide, not settings.
    assert mapped.digest != read.digest


def test_a_large_file_alone_is_cut_between_characters(tmp_path):
    path = tmp_path / "all.txt"
    path.write_text("é" * LARGE)
    found = load_corpus((str(path),), 0.333)
    train, held = found.train, found.validation
    text = train[: len(train) - 1].tobytes() + held[: len(held) - 1].tobytes()
    assert text == path.read_bytes()
    assert set(held[: len(held) - 1].tobytes().decode()) == {"é"}
    assert train[len(train) - 1 : len(train)] == held[len(held) - 1 : len(held)] == [0]


@pytest.mark.parametrize(
    ("at", "content", "message"),
    [
        (700, b"\0", "NUL byte at offset 700"),
        (CHUNK, b"\x80", f"not UTF-8 at offset {CHUNK}"),
        (0, b"\x80", "not UTF-8 at offset 0"),
        (2 * CHUNK - 1, b"\xe2", f"not UTF-8 at offset {2 * CHUNK - 1}"),
        (CHUNK, b"\x80" * 5, f"not UTF-8 at offset {CHUNK}"),
        (LARGE - 1, b"\xe2", f"not UTF-8 at offset {LARGE - 1}"),
    ],
)
def test_a_large_file_that_is_no_text_is_refused(tmp_path, at, content, message):
    path = tmp_path / "corpus.bin"
    data = bytearray(b"a" * LARGE)
    data[at : at + len(content)] = content
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"corpus\.bin is not text: .*{message}"):
        read_file(path, SourceKind.TEXT)
    assert not manifest.manifest_path(path).exists()


@pytest.mark.parametrize("shift", range(4))
def test_characters_may_lie_across_chunks(tmp_path, shift):
    path = tmp_path / "all.txt"
    path.write_text("a" * shift + "\U0001f600" * LARGE)
    assert read_file(path, SourceKind.TEXT).values.tobytes() == path.read_bytes()


def test_an_island_believes_the_manifests_of_its_copies(folder, reads, monkeypatch):
    monkeypatch.setattr(corpus, "SAMPLES", 6)
    run = RunConfig(
        data=DataConfig(paths=(str(folder),), validation_fraction=0.3),
        sequence_length=16,
    )
    config = Config(run=run, islands={"a": IslandConfig()})
    digest = resolve(config).run.data.digest
    for path in folder.glob("*.txt"):
        copied(path)
    reads.clear()
    assert resolve(config, copied=True).run.data.digest == digest
    assert len(reads) == 6
    assert resolve(config).run.data.digest == digest
    assert len(reads) == 6 + 2 * 16 + 47


def test_what_ends_like_a_manifest_is_a_document_unless_it_is_one(folder):
    (folder / "0.txt.manifest").write_text("about a small file")
    (folder / "app.manifest").write_text("about nothing here")
    for _ in range(2):
        names = load_corpus((str(folder),), 0.3).names
        assert names == (
            *("0.txt", "0.txt.manifest", "1.txt", "2.txt", "3.txt", "4.txt"),
            "app.manifest",
        )
    assert (folder / "1.txt.manifest").exists()


def test_the_command_makes_what_is_missing(folder, reads, capsys):
    assert manifest_command([str(folder)]) == 0
    told = capsys.readouterr().err
    assert "1.txt: 1,000 tokens up to 195, digest " in told
    assert "2 files below 0 MB need none" in told
    assert len(reads) == 2 * 16 + 47
    copied(folder / "1.txt")
    (folder / "2.txt").write_text("x" * LARGE)
    manifest.manifest_path(folder / "4.txt").unlink()
    reads.clear()
    assert manifest_command([str(folder), "--missing"]) == 0
    assert len(reads) == 2 * 16
    assert manifest_command([str(folder), "--missing"]) == 0
    assert len(reads) == 2 * 16


def test_of_many_starts_one_reads_a_file(folder, reads, monkeypatch, caplog):
    monkeypatch.setattr(manifest, "LOCK_POLL_S", 0.01)
    path, others, facts = folder / "2.txt", threading.Event(), manifest._facts

    def slow(*args):
        # The others have come while this one reads.
        assert others.wait(WAIT_S)
        return facts(*args)

    monkeypatch.setattr(manifest, "_facts", slow)
    with ThreadPoolExecutor(4) as pool:
        starts = [pool.submit(read_file, path, SourceKind.TEXT) for _ in range(4)]
        deadline = time.monotonic() + WAIT_S
        while caplog.text.count("waiting for another process") < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        others.set()
        assert len({start.result(WAIT_S).digested for start in starts}) == 1
    assert len(reads) == 47


def test_a_file_system_without_locks_costs_a_reading(folder, reads, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(manifest.fcntl, "flock", refuse)
    assert len(read_file(folder / "2.txt", SourceKind.TEXT).values) == 3 * LARGE
    assert len(reads) == 47


def test_a_long_reading_is_told_with_its_remedy(folder, monkeypatch, caplog, capsys):
    load_corpus((str(folder),), 0.3)
    assert not any(r.name.startswith("diloco_jax.data") for r in caplog.records)
    monkeypatch.setattr(manifest, "TOLD_FROM", 2 * LARGE)
    monkeypatch.setattr(corpus, "TOLD_FROM", 40)
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    (folder / "2.txt.manifest").unlink()
    load_corpus((str(folder),), 0.3)
    path = folder / "2.txt"
    assert f"reading {path} once, for its manifest; `diloco manifest" in caplog.text
    assert "reading 2 files of text, as every start does" in caplog.text
    assert re.search(r"reading: \d+%, 0:\d\d left", capsys.readouterr().err)
