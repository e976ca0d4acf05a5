"""Prepared folders are what their manifest says, and rows come back from them."""

import json
from concurrent.futures import ThreadPoolExecutor

import fsspec
import msgspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from prepare_support import made, many

from diloco_jax import cli
from diloco_jax.config import ConfigError
from diloco_jax.data.prepared import (
    CHUNK_BYTES,
    MANIFEST,
    DataFolder,
    PreparedRows,
    read_manifest,
    require_whole,
)
from diloco_jax.files import StorageAway


def test_files_are_those_of_the_manifest(texts, tmp_path):
    prepared, *_ = made(tmp_path)
    folder = tmp_path / "out"
    require_whole(folder, read_manifest(folder))
    assert read_manifest(folder).digest == prepared.digest
    path = folder / prepared.train.shards[0].name
    data = bytearray(path.read_bytes())
    assert len(data) < CHUNK_BYTES
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"digest of bytes from 0 on is .* there"):
        require_whole(folder, prepared)
    path.write_bytes(data[:-1])
    with pytest.raises(ConfigError, match=f"size is {len(data) - 1} here, {len(data)}"):
        require_whole(folder, prepared)
    path.unlink()
    with pytest.raises(ConfigError, match=r"size is No such file or directory here"):
        require_whole(folder, prepared)
    newer = msgspec.structs.replace(prepared, format=99)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(newer))
    with pytest.raises(ConfigError, match=r"has format 99, .* reads formats 2 and 3"):
        read_manifest(folder)
    there = msgspec.structs.replace(prepared.tokenizer, file="../x.json")
    outside = msgspec.structs.replace(prepared, tokenizer=there)
    (folder / MANIFEST).write_bytes(msgspec.json.encode(outside))
    with pytest.raises(ConfigError, match=r"the file '../x.json', which does not lie"):
        read_manifest(folder)
    older = {**msgspec.to_builtins(prepared), "format": 1}
    del older["ends"], older["train"]["counts"]["chats"]
    (folder / MANIFEST).write_bytes(msgspec.json.encode(older))
    with pytest.raises(ConfigError, match=r"has format 1, .* make the folder again"):
        read_manifest(folder)


def test_a_prepared_folder_needs_no_other_manifests(
    texts, tmp_path, monkeypatch, capsys
):
    made(tmp_path)
    monkeypatch.setattr("diloco_jax.data.documents.MAPPED_FROM", 1)
    (tmp_path / "out" / "beside").mkdir()
    (tmp_path / "out" / "beside" / "a.txt").write_text("text")
    assert cli.main(["manifest", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().err
    assert "a.txt: 4 tokens" in said
    assert "3 files in prepared folders have theirs already" in said
    assert not list((tmp_path / "out").glob("*.manifest"))


def test_rows_are_read_from_many_files(tmp_path, monkeypatch):
    many(tmp_path, 100)
    prepared, train, _ = made(tmp_path, part_bytes=2000)
    assert len(prepared.train.shards) > 5
    want = [train[number]["tokens"] for number in range(len(train))]
    monkeypatch.setattr("diloco_jax.data.prepared.MOST_OPEN", 2)
    few = PreparedRows(tmp_path / "out", prepared, prepared.train)
    for number in np.random.default_rng(0).permutation(len(train)):
        np.testing.assert_array_equal(few[int(number)]["tokens"], want[number])
    assert few._reader.cache_info().currsize == 2
    with ThreadPoolExecutor(8) as pool:
        order = np.random.default_rng(1).permutation(len(train)).tolist()
        for number, row in zip(order, pool.map(few.__getitem__, order), strict=True):
            np.testing.assert_array_equal(row["tokens"], want[number])
    with pytest.raises(IndexError, match=f"row {len(train)} of {len(train)}"):
        train[len(train)]


def test_a_row_that_cannot_be_read_is_named(tmp_path):
    many(tmp_path, 100)
    prepared, train, _ = made(tmp_path)
    want = [train[number]["tokens"].tobytes() for number in range(len(train))]
    path = tmp_path / "out" / prepared.train.shards[0].name
    data = bytearray(path.read_bytes())
    middle = len(data) // 3
    data[middle : middle + 99] = bytes(byte ^ 90 for byte in data[middle : middle + 99])
    path.write_bytes(data)
    rows = PreparedRows(tmp_path / "out", prepared, prepared.train)
    found = []

    def read_all():
        for number in range(len(rows)):
            found.append(rows[number]["tokens"].tobytes())

    with pytest.raises(OSError, match=rf"row \d+ of .*{path.name} cannot be read"):
        read_all()
    assert found
    assert found == want[: len(found)]
    path.unlink()
    gone = PreparedRows(tmp_path / "out", prepared, prepared.train)
    with pytest.raises(OSError, match=f"row 5 of .*{path.name} cannot be read"):
        gone[5]


class Failing:
    """A bucket that answers everything with an error."""

    def __init__(self, error) -> None:
        self._error = error

    def __getattr__(self, name):
        def fails(*given, **options):
            raise self._error

        return fails


class AwayError(Exception):
    code = 503


@pytest.mark.parametrize(
    "asked",
    [
        lambda folder: (folder.has(MANIFEST), folder.has("none")),
        lambda folder: folder.sizes([MANIFEST]),
        lambda folder: (folder.read(MANIFEST), folder.read(MANIFEST, 3, 9)),
        lambda folder: folder.at_hand(MANIFEST).read_bytes(),
        lambda folder: require_whole(str(folder), read_manifest(str(folder))),
    ],
    ids=["has", "sizes", "read", "at_hand", "require_whole"],
)
def test_a_bucket_answers_as_a_folder_does_or_says_why_not(
    asked, texts, tmp_path, monkeypatch
):
    """Rows themselves are read by a library with a protocol of its own: see
    tests/runtime/test_bucket.py."""
    made(tmp_path)
    here, there = DataFolder(tmp_path / "out"), DataFolder(f"gs://bucket{tmp_path}")
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    bucket = MemoryFileSystem()
    for path in (tmp_path / "out").iterdir():
        bucket.pipe_file(there.path(path.name), path.read_bytes())
    (tmp_path / "key").write_text(json.dumps({"client_email": "trainer@p.iam"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key"))
    answers = [Failing(PermissionError("403: no")), Failing(AwayError("busy"))]
    answers += [bucket] * 99
    monkeypatch.setattr(fsspec, "filesystem", lambda kind: answers.pop(0))
    with pytest.raises(ConfigError) as refused:
        asked(there)
    account, role = f"{there} as trainer@p.iam: 403: no", "roles/storage.objectViewer"
    assert f"{account}. Grant {role} on bucket bucket" in str(refused.value)
    with pytest.raises(StorageAway, match=f"{there} does not answer: busy; start"):
        asked(there)
    assert asked(there) == asked(here)
