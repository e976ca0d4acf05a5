"""A run whose rows and checkpoints are in a bucket, as machines that share no disk have
them: a server here speaks Google Cloud Storage's protocol, and everything else is what
runs elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import make_tokenizers
import pytest
import support
import tape_checks
from bucket_support import TIMEOUT_S, Bucket, bucket
from runtime_support import PATIENCE_S, await_gone
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax import cli, run_files
from diloco_jax.config import (
    Config,
    DataConfig,
    InnerConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.config.resolving import resolve
from diloco_jax.data.tokenizers import open_tokenizer
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import read_tape

pytestmark = pytest.mark.dist

__all__ = ["bucket"]

FOLDER = "runs/one"
PARTS = [f"{FOLDER}/{part}" for part in ("islands/pair", "islands/solo", "coordinator")]
BATCH = 4
NAMES = ("numbers", "letters")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prepared folders of one tokenizer, and that."""
    root: Path = tmp_path_factory.mktemp("prepared")
    tokenizer = make_tokenizers.make_json(root / "tokenizer")
    for name in NAMES:
        lines = [
            f'{{"text": "{name} {n} {n * n} {chr(97 + n % 26) * (n % 30)}"}}\n'
            for n in range(300)
        ]
        (root / f"{name}.jsonl").write_text("".join(lines))
        command = ["data", "prepare", str(root / name), str(root / f"{name}.jsonl")]
        length = ["--sequence-length", str(SEQUENCE_LENGTH), "--workers", "1"]
        which = ["--tokenizer", str(tokenizer), "--validation-fraction", "0.1"]
        assert cli.main([*command, *length, *which]) == 0
    return root


def config_of(*paths: object) -> Config:
    """One island has two hosts: each reads half of its rows, and they write each
    checkpoint together."""
    run = RunConfig(
        model=dataclasses.replace(MODEL, vocab_size=512),
        data=DataConfig(paths=tuple(map(str, paths)), weights=(2.0, 1.0)),
        inner=InnerConfig(
            learning_rate=1e-2, schedule="constant", warmup_fraction=0, rewarm_steps=0
        ),
        sync=SyncConfig(steps_per_cycle=6, fragments=2, quorum=1),
        sequence_length=SEQUENCE_LENGTH,
        total_tokens=10**9,
    )
    islands = {
        "pair": IslandConfig(batch_size=BATCH, hosts=2, mesh_fsdp=2, step_seconds=0.1),
        "solo": IslandConfig(batch_size=BATCH, accumulation=2, step_seconds=0.1),
    }
    placement = Placement(
        checkpoints=f"gs://bucket/{FOLDER}",
        checkpoint_every_s=1.0,
        snapshot_every_s=1.0,
        snapshots_kept=2,
        time_budget_s=PATIENCE_S,
    )
    return Config(run=run, islands=islands, placement=placement)


@pytest.fixture(scope="module")
def resumed(bucket: Bucket, root: Path, tmp_path_factory) -> Path:
    """Workdir of a run whose processes are all killed; it goes on until both islands
    are back, and is asked to end."""
    for name in NAMES:
        bucket.put(root / name, f"rows/{name}")
    folder: Path = tmp_path_factory.mktemp("bucket")
    there = [f"gs://bucket/rows/{name}" for name in NAMES]
    write_config_json(config_of(*there).validate(), folder / "two.json")
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
        await_true(folder, second, lambda: len(restored(workdir)) == 2)
        second.send_signal(signal.SIGINT)
        second.wait(TIMEOUT_S)
    return workdir


def in_bucket(bucket: Bucket, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*support.DILOCO, *map(str, arguments)],
        env={**os.environ, **bucket.environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


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
    done = in_bucket(bucket, "eval", resumed, "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((resumed / "summary.json").read_bytes())
    found = json.loads(done.stdout)
    assert found["eval_merges"] == summary["merges"] > 0
    assert 0 < found["eval_loss"] < math.log(512)


# ---- its rows ------------------------------------------------------------------------


def test_its_rows_are_those_of_a_disk(resumed, root):
    summary = json.loads((resumed / "summary.json").read_bytes())
    config = read_config_json(resumed / "config.json")
    tape = list(read_tape(resumed / "tape.jsonl"))
    sizes = support.fragment_sizes(config)
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
    # It is the data of this disk, row for row.
    here = resolve(config_of(root / "numbers", root / "letters"))
    assert here.run.data.digest == config.run.data.digest
    assert here.run.fingerprint() == config.run.fingerprint()
    numbers, letters = summary["rows_by_source"].values()
    assert abs(numbers - 2 * letters) <= 3 * BATCH
    kept = open_tokenizer(resumed / "source").digest
    assert kept == open_tokenizer(root / "tokenizer").digest


def test_islands_tell_their_loss_on_each_source(resumed):
    """Also the island of two hosts, each of which knows the sources of its own rows."""
    paths = read_config_json(resumed / "config.json").run.data.paths
    last = {
        line["island"]: line
        for line in read_metrics(resumed)
        if line["kind"] == "island"
        and None not in (line["loss_by_source"] or {0: None}).values()
    }
    assert last.keys() == {"pair", "solo"}
    for line in last.values():
        losses = line["loss_by_source"]
        assert tuple(losses) == paths
        assert len(set(losses.values())) == 2
        assert all(0 < loss < math.log(512) for loss in losses.values())
        least, most = min(losses.values()), max(losses.values())
        assert least - 0.05 < line["loss"] < most + 0.05


THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from diloco_jax.data.prepared import read_manifest
from diloco_jax.data.prepared import PreparedRows
here, there = (
    PreparedRows(folder, found, found.train)
    for folder in sys.argv[1:]
    for found in [read_manifest(folder)]
)
assert len(here) == len(there) > 100
with ThreadPoolExecutor(8) as pool:
    for number, row in enumerate(pool.map(there.__getitem__, range(len(here)))):
        for name, array in here[number].items():
            assert (row[name] == array).all(), number
"""


REFUSED = """
import sys
from diloco_jax import cli
workdir, *configs = sys.argv[1:]
for config in configs:
    assert cli.main(["run", config, "--workdir", workdir]) == 2, config
"""


def test_several_threads_read_at_once(resumed, bucket, root):
    subprocess.run(
        [
            sys.executable,
            "-c",
            THREADS,
            str(root / "numbers"),
            "gs://bucket/rows/numbers",
        ],
        env={**os.environ, **bucket.environment},
        timeout=TIMEOUT_S,
        check=True,
    )


def test_what_is_not_there_is_named(bucket, root, tmp_path):
    bucket.put(root / "letters", "broken/letters")
    (shard, *_) = [n for n in bucket.names() if n.startswith("broken/letters/train")]
    bucket.delete(shard)
    shown = {
        "gs://bucket/none": "gs://bucket/none is no prepared folder (it has no",
        "gs://nowhere/none": "gs://nowhere/none",
        "s3://bucket/rows": "is a bucket, and rows are read of gs://",
        "gs://bucket/broken/letters": f"{shard} is not the file of prepared.json: ",
    }
    paths = []
    for number, path in enumerate(shown):
        config = config_of(path)
        data = dataclasses.replace(config.run.data, weights=())
        run = dataclasses.replace(config.run, data=data)
        paths.append(tmp_path / f"{number}.json")
        write_config_json(dataclasses.replace(config, run=run), paths[-1])
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, str(tmp_path / "run"), *map(str, paths)],
        env={**os.environ, **bucket.environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    said = done.stderr.replace("\n", " ").split("error: ")[1:]
    assert len(said) == len(shown), done.stderr
    for one, (path, words) in zip(said, shown.items(), strict=True):
        assert path in one
        assert words in one
    assert not (tmp_path / "run").exists()
