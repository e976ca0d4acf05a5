"""Checkpoints in a bucket, as machines that share no disk have them: a server here
speaks Google Cloud Storage's protocol, and everything else is what runs elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import support
from bucket_support import TIMEOUT_S, Bucket, bucket
from runtime_support import PATIENCE_S, await_gone, make_config, with_run

from diloco_jax import run_files
from diloco_jax.config import IslandConfig, Placement
from diloco_jax.config.loading import write_config_json
from diloco_jax.observability.tape import read_tape

pytestmark = pytest.mark.dist

__all__ = ["bucket"]

FOLDER = "runs/one"
PARTS = [f"{FOLDER}/{part}" for part in ("islands/pair", "islands/solo", "coordinator")]


@pytest.fixture(scope="module")
def resumed(bucket, text, tmp_path_factory):
    """All processes of a run are killed; it goes on until both islands are back, and is
    asked to end. One island has two hosts, which write each checkpoint together."""
    folder = tmp_path_factory.mktemp("bucket")
    config = with_run(make_config(text, quorum=1), total_tokens=10**9)
    islands = {
        "pair": IslandConfig(batch_size=4, hosts=2, mesh_fsdp=2, step_seconds=0.1),
        "solo": IslandConfig(batch_size=4, step_seconds=0.1),
    }
    placement = Placement(
        checkpoints=f"gs://bucket/{FOLDER}",
        checkpoint_every_s=1.0,
        snapshot_every_s=1.0,
        snapshots_kept=2,
        time_budget_s=PATIENCE_S,
    )
    config = dataclasses.replace(config, islands=islands, placement=placement)
    write_config_json(config.validate(), folder / "two.json")
    workdir = folder / "run"
    with started(
        bucket, folder, str(folder / "two.json"), "--workdir", str(workdir)
    ) as (first):
        await_true(folder, first, lambda: all(bucket.complete(part) for part in PARTS))
        pids = json.loads((workdir / run_files.PROCESSES).read_bytes()).values()
        first.send_signal(signal.SIGKILL)
        first.wait(TIMEOUT_S)
    await_gone([pid for hosts in pids for pid in hosts])
    with started(bucket, folder, "--resume", str(workdir)) as second:
        await_true(folder, second, lambda: len(restored(workdir)) == len(islands))
        second.send_signal(signal.SIGINT)
        second.wait(TIMEOUT_S)
    return workdir


def restored(workdir: Path) -> dict[str, int]:
    """Islands, and after how many steps they had the moments that they took over."""
    records = [r for r in read_tape(workdir / "tape.jsonl") if r["kind"] == "island"]
    return {
        r["island"]: r["record"]["value"]
        for r in records
        if r["record"]["kind"] == "restored" and r["record"]["fragment"] < 0
    }


@contextlib.contextmanager
def started(bucket: Bucket, folder: Path, *options: str):
    """`diloco run`, killed at the end if it is still there."""
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [*support.DILOCO, "run", *options],
            cwd=folder,
            env={**os.environ, **bucket.environment},
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(TIMEOUT_S)


def await_true(folder: Path, process: subprocess.Popen, happened) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not happened():
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_run_goes_on_from_what_is_in_the_bucket(resumed):
    tape = list(read_tape(resumed / "tape.jsonl"))
    (recovered,) = (r for r in tape if r["kind"] == "recovered")
    assert sum(version[1] for version in recovered["versions"]) > 0
    assert min(restored(resumed).values()) > 0


def test_nothing_of_it_is_on_this_machine(resumed, bucket):
    assert not (resumed / run_files.CHECKPOINTS).exists()
    assert not list(resumed.parent.rglob("gs:"))
    assert len(bucket.complete(f"{FOLDER}/coordinator")) == 2, "older ones are deleted"


def test_loss_and_parameters_are_read_from_the_bucket(resumed, bucket):
    done = subprocess.run(
        [*support.DILOCO, "eval", str(resumed), "--json"],
        env={**os.environ, **bucket.environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((resumed / "summary.json").read_bytes())
    found = json.loads(done.stdout)
    assert found["eval_merges"] == summary["merges"] > 0
    assert 0 < found["eval_loss"] < math.log(256)
