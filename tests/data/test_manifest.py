"""A large file of tokens is read once; a file that is not the one read is refused."""

import fcntl
import math
import os

import numpy as np
import pytest

from diloco_jax.config import ConfigError, DataConfig
from diloco_jax.data import manifest
from diloco_jax.data.commands import manifest_command
from diloco_jax.data.corpus import load_checked_corpus, load_corpus
from diloco_jax.data.documents import SourceKind, read_file

CHUNK = 64
"""Tokens of a chunk in these tests."""


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr("diloco_jax.data.manifest.MAPPED_FROM", 1)
    monkeypatch.setattr(manifest, "CHUNK_BYTES", 4 * CHUNK)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(10 * CHUNK, dtype=np.int32) % 100)
    return path


@pytest.fixture
def reads(monkeypatch):
    """Sizes of the chunks that are read."""
    sizes, digest = [], manifest._digest
    monkeypatch.setattr(
        manifest, "_digest", lambda chunk: sizes.append(len(chunk)) or digest(chunk)
    )
    return sizes


def copy_of(path, seconds=5):
    """Changes the time of a file, as a copy does."""
    then = path.stat().st_mtime_ns + seconds * 10**9
    os.utime(path, ns=(then, then))


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


def test_of_a_copy_a_few_chunks_are_read(path, reads, monkeypatch):
    monkeypatch.setattr("diloco_jax.data.corpus.SAMPLES", 3)
    data = run_of(path)
    copy_of(path)
    reads.clear()
    assert load_checked_corpus(data).digest == data.digest
    assert reads == [CHUNK] * 3


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


def test_the_wait_for_another_reader_has_a_deadline(path, reads, monkeypatch):
    """A process that was stopped keeps its lock."""
    monkeypatch.setattr(manifest, "LOCK_POLL_S", 0.01)
    monkeypatch.setattr(manifest, "LOCK_WAIT_S", 0.05)
    monkeypatch.setattr(manifest, "SLOWEST_BYTES_PER_S", math.inf)
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"process has been reading .*tok"):
            read_file(path, SourceKind.TOKENS)
        assert reads == []
    assert read_file(path, SourceKind.TOKENS).largest == 99


def test_the_deadline_grows_with_the_file(path, monkeypatch):
    """A reading that takes its time is waited for."""
    monkeypatch.setattr(manifest, "LOCK_POLL_S", 0.01)
    monkeypatch.setattr(manifest, "LOCK_WAIT_S", 0.0)
    monkeypatch.setattr(manifest, "SLOWEST_BYTES_PER_S", path.stat().st_size / 60)
    other = path.open("rb")
    fcntl.flock(other, fcntl.LOCK_EX)
    waits = iter(range(3))

    def sleep(_):
        if next(waits) == 2:
            other.close()

    monkeypatch.setattr(manifest.time, "sleep", sleep)
    assert read_file(path, SourceKind.TOKENS).largest == 99


def test_manifests_are_no_documents(path):
    load_corpus((str(path.parent),), 0.1)
    assert manifest.manifest_path(path).exists()
    assert load_corpus((str(path.parent),), 0.1).names == ("tokens.npy",)


def test_a_damaged_manifest_is_named(path):
    manifest.manifest_path(path).write_text("{}")
    with pytest.raises(ConfigError, match=r"tokens\.npy\.manifest is no manifest"):
        read_file(path, SourceKind.TOKENS)


def test_the_command_writes_manifests_anew(path, reads, capsys):
    assert manifest_command([str(path.parent)]) == 0
    assert "tokens.npy: 640 tokens up to 99" in capsys.readouterr().err
    copy_of(path)
    assert manifest_command([str(path)]) == 0
    assert len(reads) == 20
    assert manifest.is_unchanged(path, manifest.find(path))
