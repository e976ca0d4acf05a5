"""A large file, of tokens or text, is read once, and its row is what a reading gives; a
file that is not the one read is refused."""

import re

import numpy as np
import pytest
from prepare_support import copy_of

from diloco_jax.config import Config, ConfigError, DataConfig, IslandConfig, RunConfig
from diloco_jax.config.resolving import resolve
from diloco_jax.data import corpus, documents, manifest
from diloco_jax.data.commands import manifest_command
from diloco_jax.data.corpus import load_checked_corpus, load_corpus
from diloco_jax.data.documents import SourceKind
from diloco_jax.data.manifest import read_file
from diloco_jax.errors import EXIT_FAILED
from diloco_jax.observability import terminal

LARGE, BYTES = 1000, 256
"""Bytes from which a file is large in these tests, and bytes of a chunk."""
CHUNK = BYTES // 4
"""Tokens of a chunk."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(documents, "MAPPED_FROM", LARGE)
    monkeypatch.setattr(manifest, "CHUNK_BYTES", BYTES)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(10 * CHUNK, dtype=np.int32) % 100)
    return path


def run_of(path):
    digest = load_corpus((str(path),), 0.1).digest
    return DataConfig(paths=(str(path),), validation_fraction=0.1, digest=digest)


def test_a_start_does_not_read_the_file(path, reads):
    data = run_of(path)
    assert len(reads) == 10
    reads.clear()
    assert load_checked_corpus(data).digest == data.digest
    assert load_corpus((str(path),), 0.1).largest == 99
    assert reads == []


def test_a_changed_file_is_refused_with_both_values(path):
    data = run_of(path)
    before = path.stat()
    tokens = np.load(path)
    tokens[0] = 42
    np.save(path, tokens)
    copy_of(path)
    assert path.stat().st_size == before.st_size
    chunk = r"digest of tokens 0 to 64 is \w{16} here, \w{16} there; bring back"
    with pytest.raises(ConfigError, match=rf"tokens\.npy is not the file .*{chunk}"):
        load_checked_corpus(data)
    np.save(path, tokens[:-1])
    with pytest.raises(ConfigError, match="size is 2684 here, 2688 there"):
        load_checked_corpus(data)


def test_a_new_run_reads_a_changed_file_anew(path):
    first = load_corpus((str(path),), 0.1).digest
    np.save(path, np.load(path)[::-1])
    copy_of(path)
    second = load_corpus((str(path),), 0.1).digest
    assert second != first
    with pytest.raises(ConfigError, match=f"data.digest = {first} .* has.* {second}"):
        load_checked_corpus(DataConfig(paths=(str(path),), digest=first))


def test_the_digest_does_not_depend_on_the_manifest(path):
    read = read_file(path, SourceKind.TOKENS).digested
    manifest.manifest_path(path).unlink()
    assert read_file(path, SourceKind.TOKENS, samples=1).digested == read


def test_a_folder_that_takes_no_files_costs_a_reading_and_a_warning(
    path, reads, monkeypatch, caplog
):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(manifest.files, "write_text", refuse)
    assert read_file(path, SourceKind.TOKENS).largest == 99
    assert "Permission denied" in caplog.text
    assert not manifest.manifest_path(path).exists()
    assert read_file(path, SourceKind.TOKENS, samples=1).largest == 99
    assert len(reads) == 20
    assert manifest_command([str(path)]) == EXIT_FAILED


def test_manifests_are_no_documents(path):
    load_corpus((str(path.parent),), 0.1)
    assert manifest.manifest_path(path).exists()
    assert load_corpus((str(path.parent),), 0.1).names == ("tokens.npy",)


def test_a_damaged_manifest_is_named(path):
    manifest.manifest_path(path).write_text("{}")
    with pytest.raises(ConfigError, match=r"tokens\.npy\.manifest is no manifest"):
        read_file(path, SourceKind.TOKENS)


# ---- text ------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number, length in enumerate((30, LARGE, 3 * LARGE, 17, LARGE)):
        (folder / f"{number}.txt").write_text(chr(97 + number) * (length - 2) + "é")
    return folder


def test_large_and_small_documents_make_one_row(folder, monkeypatch):
    mapped = load_corpus((str(folder),), 0.3)
    monkeypatch.setattr(documents, "MAPPED_FROM", 1 << 30)
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


@pytest.mark.parametrize(
    ("at", "content", "message"),
    [
        (700, b"\0", "NUL byte at offset 700"),
        (BYTES, b"\x80", f"not UTF-8 at offset {BYTES}"),
        (0, b"\x80", "not UTF-8 at offset 0"),
        (2 * BYTES - 1, b"\xe2", f"not UTF-8 at offset {2 * BYTES - 1}"),
        (BYTES, b"\x80" * 5, f"not UTF-8 at offset {BYTES}"),
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
        copy_of(path)
    reads.clear()
    assert resolve(config, copied=True).run.data.digest == digest
    assert len(reads) == 6
    assert resolve(config).run.data.digest == digest
    assert len(reads) == 6 + 2 * 4 + 12


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
    assert len(reads) == 2 * 4 + 12
    copy_of(folder / "1.txt")
    (folder / "2.txt").write_text("x" * LARGE)
    manifest.manifest_path(folder / "4.txt").unlink()
    reads.clear()
    assert manifest_command([str(folder), "--missing"]) == 0
    assert len(reads) == 2 * 4
    assert manifest_command([str(folder), "--missing"]) == 0
    assert len(reads) == 2 * 4


def test_a_long_reading_is_told_with_its_remedy(folder, monkeypatch, caplog, capsys):
    load_corpus((str(folder),), 0.3)
    assert not any(r.name.startswith("diloco_jax.data") for r in caplog.records)
    monkeypatch.setattr(manifest, "TOLD_FROM", 2 * LARGE)
    monkeypatch.setattr(terminal, "LINE_EVERY_S", 0.0)
    (folder / "2.txt.manifest").unlink()
    load_corpus((str(folder),), 0.3)
    path = folder / "2.txt"
    assert f"reading {path} once, for its manifest; `diloco manifest" in caplog.text
    assert re.search(r"reading: \d+%, 0:\d\d left", capsys.readouterr().err)
