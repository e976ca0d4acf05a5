"""Sealed files come back whole, or not at all."""

import errno
import os

import numpy as np
import pytest
from etils import epath

from diloco_jax import files

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
