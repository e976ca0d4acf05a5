"""Sealed files come back whole, or not at all; paths of a config mean the same in any
folder."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from etils import epath

from diloco_jax import files
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    Placement,
    RunConfig,
)
from diloco_jax.config.resolving import with_absolute_paths
from diloco_jax.files import absolute, naming

ARRAYS = [np.arange(7, dtype=np.float32).reshape(7, 1), np.arange(5, dtype=np.int8)]


def blank():
    return [np.zeros_like(array) for array in ARRAYS]


@pytest.mark.parametrize("block", [3, 1 << 20])
def test_header_arrays_and_digest_come_back(tmp_path, monkeypatch, block):
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    path = epath.Path(tmp_path / "a")
    digest = files.write_sealed(path, {"n": 1}, ARRAYS)
    assert digest == files.digest_of(b"".join(a.tobytes() for a in ARRAYS))
    found = blank()
    assert files.read_sealed(path, found) == ({"n": 1}, digest)
    assert all(map(np.array_equal, ARRAYS, found))
    assert files.read_sealed_header(path) == {"n": 1}


def is_in_memory(path, at):
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(1)], at, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False


def test_the_system_keeps_no_second_copy_of_what_was_read(tmp_path):
    """It would fill the memory of a coordinator that restores its state."""
    path, values = tmp_path / "a", np.ones(4 << 20, np.uint8)
    files.write_sealed(path, {}, [values])
    assert is_in_memory(path, 1 << 20)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if is_in_memory(path, 1 << 20):
        pytest.skip("a file system that is in memory")
    files.read_sealed(path, [np.empty_like(values)])
    assert not is_in_memory(path, 1 << 20)


@pytest.mark.parametrize("at", [2, 10, 15, 22, 40, -1])
def test_a_changed_byte_is_found(tmp_path, at):
    path = tmp_path / "a"
    files.write_sealed(path, {"n": 1}, ARRAYS)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(files.SealedError, match=str(path)):
        files.read_sealed(path, blank())


def test_arrays_of_other_sizes_are_found(tmp_path):
    files.write_sealed(tmp_path / "a", {}, ARRAYS)
    for others in (blank()[:1], [*blank(), np.zeros(1, np.int8)]):
        with pytest.raises(files.SealedError):
            files.read_sealed(tmp_path / "a", others)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: files.write_sealed(path, {}, ARRAYS),
        lambda path: files.write_text("a lead's number", path),
    ],
)
def test_it_is_on_disk_before_it_has_its_name_and_its_name_is_too(
    tmp_path, monkeypatch, write
):
    path, synced = tmp_path / "a", []

    def fsync(descriptor):
        synced.append((os.fstat(descriptor).st_ino, path.exists()))

    monkeypatch.setattr("os.fsync", fsync)
    write(path)
    inodes = [file.stat().st_ino for file in (path, tmp_path)]
    assert synced == [(inodes[0], False), (inodes[1], True)]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a"
    files.write_sealed(path, {"n": 1}, ARRAYS)

    def fails():
        yield ARRAYS[0]
        raise OSError(errno.ENOSPC, "no space left on device")

    with pytest.raises(OSError, match="no space left"):
        files.write_sealed(path, {"n": 2}, fails())
    assert files.read_sealed_header(path) == {"n": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_paths_are_those_of_the_folder_that_they_were_written_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = Config(
        run=RunConfig(
            data=DataConfig(paths=("text", "~/more")),
            model=ModelConfig(factory="models/m.py:make"),
        ),
        placement=Placement(
            workdir="~/runs/x", certificates="certs", checkpoints="gs://bucket/folder"
        ),
    )
    made = with_absolute_paths(config)
    assert made.run.data.paths == (str(tmp_path / "text"), "/home/somebody/more")
    assert made.run.model.factory == str(tmp_path / "models/m.py:make")
    assert made.placement == Placement(
        workdir="/home/somebody/runs/x",
        certificates=str(tmp_path / "certs"),
        checkpoints="gs://bucket/folder",
    )
    assert made.run.fingerprint() == config.run.fingerprint()


def test_what_names_no_file_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config(run=RunConfig(model=ModelConfig(factory="package.module:make")))
    assert with_absolute_paths(config) == config
    assert not Path("runs").exists()


def test_the_folder_of_nobody_is_refused():
    with pytest.raises(ConfigError, match=r"~nobody-here/x: .* whole name, or \./~nob"):
        absolute("~nobody-here/x")


def write_to_a_full_disk():
    with naming("the file"), Path("/dev/full").open("wb") as file:
        file.write(b"x")
        file.flush()


def test_a_write_that_fails_names_its_file():
    with pytest.raises(OSError, match="No space left on device") as failed:
        write_to_a_full_disk()
    assert (failed.value.errno, failed.value.filename) == (errno.ENOSPC, "the file")


def test_an_error_that_names_its_file_keeps_that():
    with pytest.raises(OSError, match="nowhere"), naming("the file"):
        Path("nowhere").read_bytes()
