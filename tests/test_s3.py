"""Snapshots and weights in a bucket of S3: a server here speaks its protocol."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import fsspec
import jax
import numpy as np
import pytest
import tiny
from etils import epath
from moto.server import ThreadedMotoServer

from diloco_jax import files
from diloco_jax.config import (
    Config,
    ConfigError,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.resolving import resolve
from diloco_jax.coordinator import main
from diloco_jax.evaluation import load_params
from diloco_jax.models.build import build
from diloco_jax.weights.first import first_params, started_from

WEIGHTS = Path(__file__).parent / "models" / "families" / "qwen3"


@pytest.fixture(scope="module")
def bucket():
    """The bucket `s3://bucket`, as the library that reads it sees it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        environment.setenv("AWS_ACCESS_KEY_ID", "trainer")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "any")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        there = fsspec.filesystem("s3")
        there.mkdir("bucket")
        there.put(str(WEIGHTS), "bucket/weights", recursive=True)
        yield there
        there.clear_instance_cache()
    server.stop()


@pytest.fixture
def config(tmp_path) -> Config:
    text = tmp_path / "text.txt"
    text.write_text("one line of text\n" * 2000)
    run = RunConfig(
        model=tiny.MODEL,
        data=DataConfig(paths=(str(text),)),
        sync=SyncConfig(fragments=3),
        sequence_length=tiny.SEQUENCE_LENGTH,
    )
    placement = Placement(checkpoints="s3://bucket/run")
    config = Config(run=run, islands={"a": IslandConfig()}, placement=placement)
    return started_from(config, "hf:s3://bucket/weights").validate()


def same(ours, theirs) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_run_starts_from_weights_there_and_leaves_its_snapshots(
    bucket, config, tmp_path
):
    for life in (1, 2):
        run = main.Coordinator(resolve(config), tmp_path / "run", init=life == 1)
        try:
            run.start()
        finally:
            run.close()
    names = bucket.find("bucket/run/coordinator")
    assert any("/state-" in name for name in names)
    assert not (tmp_path / "run" / "checkpoints").exists()
    local = dataclasses.replace(config.run.model, weights=f"hf:{WEIGHTS}")
    begun = dataclasses.replace(config.run, model=local)
    same(load_params(tmp_path / "run"), first_params(begun, build(begun)))


def test_what_is_not_there_is_named(bucket, config):
    plain = config.replace("model", tiny.MODEL)
    with pytest.raises(ConfigError, match="s3://bucket/none is no source of weights"):
        started_from(plain, "hf:s3://bucket/none")


def test_a_bucket_that_is_missing_is_named_and_not_made(bucket):
    with pytest.raises(ConfigError) as refused:
        files.require_access(epath.Path("s3://misspelt/run"))
    for shown in ("s3://misspelt/run as trainer", "no such bucket", "s3:PutObject"):
        assert shown in str(refused.value)
    assert bucket.ls("") == ["bucket"]


def test_without_its_package_the_extra_is_named():
    missing = ImportError("Install s3fs to access S3")
    for said in (files.cannot_write, files.cannot_read):
        text = said(epath.Path("s3://bucket/run"), missing)
        assert "`pip install -e '.[s3]'`" in text
