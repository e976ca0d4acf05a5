"""Prepared folders in a bucket: a run reads its rows there, as it would from a disk."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import make_tokenizers
import pytest
import support
import tape_checks
from bucket_support import TIMEOUT_S, Bucket, bucket
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax import cli
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
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

STEPS, BATCH = 24, 4
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
    """One island has two hosts, each of which reads half of its rows."""
    model = dataclasses.replace(MODEL, vocab_size=512)
    run = RunConfig(
        model=model,
        data=DataConfig(paths=tuple(map(str, paths)), weights=(2.0, 1.0)),
        sync=SyncConfig(steps_per_cycle=6, fragments=2, quorum=1),
        sequence_length=SEQUENCE_LENGTH,
        total_tokens=2 * STEPS * BATCH * SEQUENCE_LENGTH,
    )
    islands = {
        "pair": IslandConfig(batch_size=BATCH, hosts=2, mesh_fsdp=2, step_seconds=0.2),
        "solo": IslandConfig(batch_size=BATCH, accumulation=2, step_seconds=0.2),
    }
    return Config(run=run, islands=islands)


def in_bucket(bucket: Bucket, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*support.DILOCO, *map(str, arguments)],
        env={**os.environ, **bucket.environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture(scope="module")
def workdir(bucket: Bucket, root: Path, tmp_path_factory) -> Path:
    """That of a run on the mixture in the bucket."""
    for name in NAMES:
        bucket.put(root / name, f"rows/{name}")
    folder: Path = tmp_path_factory.mktemp("run")
    there = [f"gs://bucket/rows/{name}" for name in NAMES]
    write_config_json(config_of(*there).validate(), folder / "config.json")
    command = ["run", folder / "config.json", "--workdir", folder / "run"]
    done = in_bucket(bucket, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "run"


def test_a_run_reads_its_rows_in_the_bucket(workdir, root):
    summary = json.loads((workdir / "summary.json").read_bytes())
    config = read_config_json(workdir / "config.json")
    assert summary["phase"] == "done"
    tape = list(read_tape(workdir / "tape.jsonl"))
    sizes = support.fragment_sizes(config)
    assert tape_checks.ledger_problems(summary, tape, sizes) == []
    # It is the data of this disk, row for row.
    here = resolve(config_of(root / "numbers", root / "letters"))
    assert here.run.data.digest == config.run.data.digest
    assert here.run.fingerprint() == config.run.fingerprint()
    numbers, letters = summary["rows_by_source"].values()
    assert abs(numbers - 2 * letters) <= 3 * BATCH
    kept = open_tokenizer(workdir / "source").digest
    assert kept == open_tokenizer(root / "tokenizer").digest


def test_islands_tell_their_loss_on_each_source(workdir):
    """Also the island of two hosts, each of which knows the sources of its own rows."""
    paths = read_config_json(workdir / "config.json").run.data.paths
    last = {
        line["island"]: line
        for line in read_metrics(workdir)
        if line["kind"] == "island"
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


def test_several_threads_read_at_once(workdir, bucket, root):
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
    for path, shown in (
        ("gs://bucket/none", "gs://bucket/none is no prepared folder (it has no"),
        ("gs://nowhere/none", "gs://nowhere/none"),
        (
            "s3://bucket/rows",
            "s3://bucket/rows is a bucket, and rows are read of gs://",
        ),
        ("gs://bucket/broken/letters", f"{shard} is not the file of prepared.json: "),
    ):
        config = config_of(path)
        data = dataclasses.replace(config.run.data, weights=())
        run = dataclasses.replace(config.run, data=data)
        write_config_json(dataclasses.replace(config, run=run), tmp_path / "c.json")
        command = ["run", tmp_path / "c.json", "--workdir", tmp_path / "run"]
        done = in_bucket(bucket, *command)
        assert done.returncode == 2, done.stderr[-3000:]
        assert shown in done.stderr.replace("\n", " ")
        assert not (tmp_path / "run").exists()
