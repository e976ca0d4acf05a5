"""Weights in a bucket start a run on machines that have nothing but another config."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import support
from bucket_support import TIMEOUT_S, bucket
from runtime_support import make_config, placed, with_run
from tiny import SEQUENCE_LENGTH

from diloco_jax.config import IslandConfig
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.evaluation import load_params
from diloco_jax.models.build import build
from diloco_jax.weights.first import first_params, started_from

pytestmark = pytest.mark.dist
__all__ = ["bucket"]

WEIGHTS = Path(__file__).parents[1] / "models" / "families" / "qwen3"
STEPS = 6


@pytest.fixture(scope="module")
def config(text):
    """A config of another model than that of the weights."""
    config = make_config(text, fragments=2, steps_per_cycle=2, quorum=1)
    config = with_run(config, total_tokens=STEPS * SEQUENCE_LENGTH)
    islands = {"a": IslandConfig(batch_size=1, step_seconds=0.3)}
    config = dataclasses.replace(config, islands=islands)
    return placed(config, time_budget_s=60.0, checkpoint_every_s=0.0).validate()


def diloco(bucket, folder: Path, *arguments: object) -> subprocess.Popen[bytes]:
    with (folder / f"{arguments[0]}.log").open("ab") as log:
        return subprocess.Popen(
            [*support.DILOCO, *map(str, arguments)],
            env={**os.environ, **bucket.environment, "TMPDIR": str(folder)},
            stdout=log,
            stderr=log,
        )


def start(bucket, folder: Path, source: str) -> tuple[subprocess.Popen[bytes], str]:
    """A coordinator that is to begin a run from this source; its address."""
    command = ["coordinator", folder / "config.json", "--workdir", folder / "run"]
    init = ["--init", source] if source else []
    process = diloco(bucket, folder, *command, *init)
    deadline = time.monotonic() + TIMEOUT_S
    address = folder / "run" / "coordinator.address"
    while not address.exists():
        assert process.poll() is None, (folder / "coordinator.log").read_text()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return process, address.read_text()


def same(ours, theirs) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(TIMEOUT_S)


def test_islands_get_the_model_of_the_coordinators_weights(config, bucket, tmp_path):
    """The coordinator is started twice, the second time with the first config alone;
    the island never names the weights."""
    bucket.put(WEIGHTS, "weights")
    write_config_json(config, tmp_path / "config.json")
    first, _ = start(bucket, tmp_path, "hf:gs://bucket/weights")
    end(first)
    begun = started_from(config, f"hf:{WEIGHTS}").run
    assert begun.model.qk_norm
    assert not config.run.model.qk_norm
    same(load_params(tmp_path / "run"), first_params(begun, build(begun)))
    assert read_config_json(tmp_path / "run" / "config.json").run.model == (
        dataclasses.replace(begun.model, weights="hf:gs://bucket/weights")
    )
    assert (tmp_path / "run" / "source" / "config.json").is_file()
    assert not list(tmp_path.rglob("source.*.tmp"))
    second, address = start(bucket, tmp_path, "")
    try:
        command = ["island", tmp_path / "config.json", "--name", "a"]
        where = ["--coordinator", address, "--workdir", tmp_path / "island"]
        island = diloco(bucket, tmp_path, *command, *where)
        assert island.wait(TIMEOUT_S) == 0, (tmp_path / "island.log").read_text()[
            -3000:
        ]
        assert second.wait(TIMEOUT_S) == 0
    finally:
        end(second)
    said = (tmp_path / "island.log").read_text()
    assert "the model is that of hf:gs://bucket/weights" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_bytes())
    assert summary["phase"] == "done"
    assert summary["tokens_merged"] > 0
    # A run in a bucket is a source, too.
    bucket.put(tmp_path / "run", "run")
    again = tmp_path / "again"
    again.mkdir()
    write_config_json(config, again / "config.json")
    third, _ = start(bucket, again, "run:gs://bucket/run")
    end(third)
    same(load_params(again / "run"), load_params(tmp_path / "run"))
    assert (again / "run" / "source" / "config.json").is_file()


REFUSED = """
import sys
from diloco_jax import cli
folder, *sources = sys.argv[1:]
command = ["coordinator", f"{folder}/config.json", "--workdir", f"{folder}/run"]
for source in sources:
    assert cli.main([*command, "--init", source]) == 2, source
"""


def test_what_is_not_in_the_bucket_is_named_there(config, bucket, tmp_path):
    write_config_json(config, tmp_path / "config.json")
    sources = ("hf:gs://bucket/none", "run:gs://bucket/none")
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, tmp_path, *sources],
        env={**os.environ, **bucket.environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert said.count("gs://bucket/none is no source of weights") == len(sources)
    assert not (tmp_path / "run").exists()
