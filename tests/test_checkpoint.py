"""Checkpoints are whole or absent, are of one run, and say why they cannot be."""

import contextlib
import errno
import json
import os

import fsspec
import jax
import numpy as np
import pytest
from botocore import exceptions
from etils import epath
from jax.sharding import SingleDeviceSharding

from diloco_jax import checkpoint, files
from diloco_jax.config import ConfigError, ModelConfig, Placement, RunConfig
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.files import StorageAway

PLAN = plan_fragments({"w": (4, 4)}, {"w": ("embed", "mlp")}, 1)


@pytest.fixture
def manager(tmp_path):
    opened = checkpoint.open_folder(tmp_path / "kept", keep=2)
    yield opened
    opened.close()


def test_trees_and_facts_come_back_and_the_oldest_go(manager, tmp_path):
    for number in (1, 2, 3):
        trees = {"a": {"x": np.full(3, number, np.float32)}, "b": [np.int32(number)]}
        checkpoint.save(manager, number, trees, {"number": number})
    assert checkpoint.newest(manager) == 3
    assert checkpoint.read_facts(manager, 2) == {"number": 2}
    np.testing.assert_array_equal(
        checkpoint.restore(manager, 2, "a")["x"], np.full(3, 2, np.float32)
    )
    here = SingleDeviceSharding(jax.devices()[0])
    like = [jax.ShapeDtypeStruct((), np.int32, sharding=here)]
    (found,) = checkpoint.restore(manager, 3, "b", like)
    assert (int(found), found.sharding) == (3, here)
    deep = [[np.float32(10 * a + b) for b in range(2)] for a in range(12)]
    checkpoint.save(manager, 4, {"c": deep}, {})
    assert checkpoint.restore(manager, 4, "c") == deep
    numbers = {p.name for p in (tmp_path / "kept").iterdir() if p.name.isdigit()}
    assert numbers == {"3", "4"}


def test_a_checkpoint_is_on_disk_when_save_returns(manager, tmp_path, monkeypatch):
    synced, fsync = set(), os.fsync

    def noted(descriptor):
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    checkpoint.save(manager, 1, {"a": np.zeros(3)}, {"b": 2})
    there = {str(path) for path in (tmp_path / "kept" / "1").rglob("*")}
    assert there | {str(tmp_path / "kept" / "1"), str(tmp_path / "kept")} <= synced


def test_what_was_left_unfinished_is_removed(manager, tmp_path):
    checkpoint.save(manager, 1, {"a": np.zeros(3)}, {})
    torn = tmp_path / "kept" / "2.orbax-checkpoint-tmp-7"
    (tmp_path / "kept" / "1").rename(tmp_path / "one")
    torn.mkdir()
    (tmp_path / "one").rename(tmp_path / "kept" / "1")
    writer = checkpoint.open_folder(tmp_path / "kept", keep=1)
    assert checkpoint.newest(writer) == 1
    checkpoint.save(writer, 3, {"a": np.zeros(3)}, {})
    assert not torn.exists()
    writer.close()


def test_a_failure_leaves_nothing_that_takes_space(manager, tmp_path):
    checkpoint.save(manager, 1, {"a": np.zeros(3)}, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoint.save(manager, 2, {"a": np.zeros(3)}, {"fact": object()})
    assert not list((tmp_path / "kept").glob("2*"))
    checkpoint.save(manager, 3, {"a": np.zeros(3)}, {})
    assert checkpoint.newest(manager) == 3


@pytest.mark.parametrize("bucket", ["gs://bucket/run", "s3://bucket/run"])
def test_folders_of_a_run_are_in_its_workdir_or_where_it_says(tmp_path, bucket):
    """Islands have no checkpoints in S3."""
    here = tmp_path / "checkpoints" / "islands" / "a"
    assert str(checkpoint.island_folder(Placement(), tmp_path, "a")) == str(here)
    elsewhere = Placement(checkpoints=bucket)
    there = checkpoint.island_folder(elsewhere, tmp_path, "a")
    own = f"{bucket}/islands/a" if bucket.startswith("gs:") else str(here)
    assert str(there) == own
    theirs = checkpoint.snapshots_folder(elsewhere, tmp_path)
    assert str(theirs) == f"{bucket}/coordinator"
    assert theirs not in there.parents, "a manager removes what it does not know"


def test_a_run_that_was_extended_reads_what_it_wrote_before():
    ours = checkpoint.whose(RunConfig(total_tokens=200), "mine", PLAN)
    theirs = checkpoint.whose(RunConfig(total_tokens=100), "mine", PLAN)
    checkpoint.refuse_other(epath.Path("f"), 3, theirs, ours)
    with pytest.raises(ConfigError, match="total_tokens: 100 here, 200 there"):
        checkpoint.refuse_other(epath.Path("f"), 3, ours, theirs)


def test_a_checkpoint_of_another_model_is_refused_with_both():
    ours = checkpoint.whose(RunConfig(), "mine", PLAN)
    checkpoint.refuse_other(epath.Path("f"), 3, ours, ours)
    other = RunConfig(model=ModelConfig(d_model=64))
    theirs = checkpoint.whose(other, "theirs", PLAN)
    with pytest.raises(ConfigError) as refused:
        checkpoint.refuse_other(epath.Path("f"), 3, theirs, ours)
    for shown in (
        "checkpoint 3 in f",
        "of run theirs",
        "this is run mine",
        "model.d_model: 192 here, 64 there",
        "--checkpoints",
    ):
        assert shown in str(refused.value)


def test_a_folder_that_cannot_be_made_is_refused_with_who_asked(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as refused:
        files.require_access(epath.Path(tmp_path / "file" / "in"))
    for shown in (f"{tmp_path}/file/in", "as user ", "Make it writable"):
        assert shown in str(refused.value)


class Denied(fsspec.AbstractFileSystem):
    """A bucket on which this account may do nothing."""

    protocol = "gs"

    def _deny(self, *args, **kwargs):
        raise PermissionError("403: no files.objects.create on this bucket")

    mkdir = makedirs = mkdirs = open = _open = exists = _deny


def test_a_bucket_without_permission_is_refused_with_the_account(tmp_path, monkeypatch):
    monkeypatch.setattr(fsspec, "filesystem", lambda *args, **kwargs: Denied())
    key = tmp_path / "key.json"
    key.write_text(json.dumps({"client_email": "trainer@p.iam"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key))
    with pytest.raises(ConfigError) as refused:
        files.require_access(epath.Path("gs://bucket/run"))
    for shown in (
        "gs://bucket/run as trainer@p.iam",
        "403: no files.objects.create",
        "roles/storage.legacyBucketReader on bucket bucket",
    ):
        assert shown in str(refused.value)


class BackendError(Exception):
    code = 503


def of_s3(status):
    answer = {"ResponseMetadata": {"HTTPStatusCode": status}}
    return exceptions.ClientError(answer, "")


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (BackendError("backend error"), True),
        (ValueError("Error opening zarr: UNAVAILABLE: no route"), True),
        (ConnectionResetError("reset by peer"), True),
        (exceptions.EndpointConnectionError(endpoint_url="http://x"), True),
        (exceptions.ReadTimeoutError(endpoint_url="http://x"), True),
        (of_s3(503), True),
        (of_s3(403), False),
        (exceptions.NoCredentialsError(), False),
        (PermissionError("403"), False),
        (ValueError("manifest is damaged"), False),
    ],
    ids=lambda given: type(given).__name__,
)
@pytest.mark.parametrize("folder", ["gs://bucket/run", "s3://bucket/run", "/run"])
def test_what_passes_is_no_fault_of_the_config(folder, error, passes):
    found = RuntimeError("it failed")
    found.__cause__ = error
    away = passes and folder != "/run"
    wanted = pytest.raises(StorageAway, match=f"{folder}.*it failed")
    with wanted if away else contextlib.nullcontext():
        files.raise_if_away(epath.Path(folder), found)


def test_who_may_not_read_a_bucket_is_told_which_rights_it_lacks():
    said = files.cannot_read(epath.Path("s3://bucket/run"), OSError(5, "it failed"))
    assert "it failed. Grant s3:ListBucket and s3:GetObject on bucket bucket" in said


def test_a_full_disk_is_told_with_the_folder(manager, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise ValueError("RESOURCE_EXHAUSTED: ... No space left on device]")

    monkeypatch.setattr(manager, "save", full)
    with pytest.raises(OSError, match="No space left on device") as failed:
        checkpoint.save(manager, 1, {"a": [np.zeros(3)]}, {})
    assert failed.value.errno == errno.ENOSPC
    assert failed.value.filename == str(tmp_path / "kept")
