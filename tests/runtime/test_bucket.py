"""A run whose rows and checkpoints are in a bucket, as machines that share no disk have
them, and one that begins with weights there: a server here speaks Google Cloud
Storage's protocol, and everything else is what runs elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import make_tokenizers
import numpy as np
import pytest
import support
import tape_checks
from runtime_support import (
    PATIENCE_S,
    await_gone,
    await_that,
    diloco,
    make_config,
    placed,
    started,
    with_run,
)
from test_compilation import compile_something
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax import cli, run_files
from diloco_jax.cluster.cluster import DILOCO, free_port
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
from diloco_jax.evaluation import load_params
from diloco_jax.island.link import ask_config
from diloco_jax.models.build import build
from diloco_jax.observability.metrics import read_metrics
from diloco_jax.observability.tape import read_tape
from diloco_jax.weights.first import first_params, started_from

pytestmark = pytest.mark.dist

TIMEOUT_S = 600.0
"""Where a machine is busy, one checkpoint in this bucket takes half a minute."""
SERVER = Path(__file__).parent / "bucket_server.py"


class Bucket:
    """`gs://bucket`, and the environment in which it is found."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.environment = {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "CLOUD_STORAGE_EMULATOR_ENDPOINT": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "any",
            "GOOGLE_CLOUD_PROJECT": "any",
            "NO_GCE_CHECK": "true",
            # It is asked by a protocol that this server does not speak.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def names(self) -> list[str]:
        """Return the names of all objects."""
        with urllib.request.urlopen(
            f"{self._url}/storage/v1/b/bucket/o", timeout=PATIENCE_S
        ) as got:
            return [item["name"] for item in json.load(got).get("items", [])]

    def put(self, folder: Path, name: str) -> None:
        """Copy the files of a local folder that are not empty into the bucket's."""
        files = (p for p in folder.rglob("*") if p.is_file())
        for path in sorted(p for p in files if p.stat().st_size):
            target = quote(f"{name}/{path.relative_to(folder)}", safe="")
            request = urllib.request.Request(
                f"{self._url}/upload/storage/v1/b/bucket/o"
                f"?uploadType=media&name={target}",
                data=path.read_bytes(),
                headers={"Content-Type": "application/octet-stream"},
            )
            urllib.request.urlopen(request, timeout=PATIENCE_S).close()

    def delete(self, name: str) -> None:
        """Delete an object."""
        url = f"{self._url}/storage/v1/b/bucket/o/{quote(name, safe='')}"
        request = urllib.request.Request(url, method="DELETE")
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()

    def complete(self, folder: str) -> set[int]:
        """Numbers of the checkpoints that are complete in one, or of the coordinator's
        snapshots of the state."""
        own = [Path(n).name for n in self.names() if n.startswith(f"{folder}/state-")]
        if own:
            return {int(name.split(".")[0].split("-")[1]) for name in own}
        ends = [n for n in self.names() if n.endswith("/commit_success.txt")]
        paths = [Path(name).relative_to(folder) for name in ends if folder in name]
        return {int(path.parts[0]) for path in paths if len(path.parts) == 2}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    port = free_port()
    command = [sys.executable, SERVER, port, 4 * TIMEOUT_S]
    log = tmp_path_factory.mktemp("server") / "log"
    found = Bucket(f"http://127.0.0.1:{port}")

    def answers() -> bool:
        with contextlib.suppress(OSError):
            found.names()
            return True
        return False

    with started(command, log):
        await_that(answers, TIMEOUT_S)
        yield found


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
    are back and have read of both sources, and is asked to end."""
    for name in NAMES:
        bucket.put(root / name, f"rows/{name}")
    folder: Path = tmp_path_factory.mktemp("bucket")
    there = [f"gs://bucket/rows/{name}" for name in NAMES]
    write_config_json(config_of(*there).validate(), folder / "two.json")
    workdir = folder / "run"
    with begun(bucket, folder, "run", "two.json", "--workdir", workdir) as first:
        await_true(folder, first, lambda: all(bucket.complete(part) for part in PARTS))
        pids = json.loads((workdir / run_files.PROCESSES).read_bytes()).values()
        first.send_signal(signal.SIGKILL)
        first.wait(TIMEOUT_S)
    await_gone([pid for hosts in pids for pid in hosts])
    with begun(bucket, folder, "run", "--resume", workdir) as second:
        await_true(
            folder,
            second,
            lambda: len(restored(workdir)) == 2 == len(losses_by_source(workdir)),
        )
        second.send_signal(signal.SIGINT)
        second.wait(TIMEOUT_S)
    return workdir


def losses_by_source(workdir: Path) -> dict[str, dict[str, Any]]:
    """The last line of each island that has read of every source."""
    return {
        line["island"]: line
        for line in read_metrics(workdir)
        if line["kind"] == "island"
        and None not in (line["loss_by_source"] or {0: None}).values()
    }


def restored(workdir: Path) -> dict[str, int]:
    """Islands, and after how many steps they had the moments that they took over."""
    records = [r for r in read_tape(workdir / "tape.jsonl") if r["kind"] == "island"]
    return {
        r["island"]: r["record"]["value"]
        for r in records
        if r["record"]["kind"] == "restored" and r["record"]["fragment"] < 0
    }


def begun(bucket: Bucket, folder: Path, *command: object):
    """A `diloco` command, killed at the end of the block if it is still there."""
    environment = {**bucket.environment, "TMPDIR": str(folder)}
    return started([*DILOCO, *command], folder / "log", folder, **environment)


def await_true(folder: Path, process: subprocess.Popen, happened) -> None:
    def goes_on() -> bool:
        assert process.poll() is None, (folder / "log").read_text()[-3000:]
        return happened()

    await_that(goes_on, TIMEOUT_S)


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
    done = diloco("eval", resumed, "--json", **bucket.environment)
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
    last = losses_by_source(resumed)
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


def test_programs_in_a_bucket_are_read_from_there(bucket, monkeypatch):
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    folder = "gs://bucket/islands/_jax-cache/_shared"
    compile_something(folder, "1 programs compiled, 0 read from the cache")
    compile_something(folder, "0 programs compiled, 1 read from the cache")
    assert len([name for name in bucket.names() if "_jax-cache/_shared/" in name]) == 1


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


# ---- weights in it -------------------------------------------------------------------


WEIGHTS = Path(__file__).parents[1] / "models" / "families" / "qwen3"


@pytest.fixture(scope="module")
def plain(text) -> Config:
    """A config of another model than that of the weights."""
    return placed(make_config(text), bind="127.0.0.1:0").validate()


@contextlib.contextmanager
def serving(bucket: Bucket, folder: Path, *source: str):
    """A coordinator that is to begin a run from this source."""
    run, init = folder / "run", ("--init", *source) if source else ()
    where = ("coordinator", folder / "config.json", "--workdir", run, *init)
    with begun(bucket, folder, *where) as process:
        await_true(folder, process, (run / run_files.ADDRESS).exists)
        yield
        process.terminate()
        assert process.wait(TIMEOUT_S) == 0


def test_a_run_begins_with_weights_in_it(plain, bucket, tmp_path):
    """Its coordinator starts again with the first config alone; and the run, copied
    there, is a source, too."""
    bucket.put(WEIGHTS, "weights")
    write_config_json(plain, tmp_path / "config.json")
    run, source = tmp_path / "run", "hf:gs://bucket/weights"
    with serving(bucket, tmp_path, source):
        pass
    here = started_from(plain, f"hf:{WEIGHTS}").run
    assert here.model.qk_norm
    assert not plain.run.model.qk_norm
    first = first_params(here, build(here))
    jax.tree.map(np.testing.assert_array_equal, load_params(run), first)
    model = dataclasses.replace(here.model, weights=source)
    assert read_config_json(run / "config.json").run.model == model
    assert (run / "source" / "config.json").is_file()
    assert not list(tmp_path.rglob("source.*.tmp"))
    with serving(bucket, tmp_path):
        address = (run / run_files.ADDRESS).read_text()
        assert ask_config(address, "a", plain.placement).run.model == model
    bucket.put(run, "run")
    (again := tmp_path / "again").mkdir()
    write_config_json(plain, again / "config.json")
    with serving(bucket, again, "run:gs://bucket/run"):
        pass
    jax.tree.map(np.testing.assert_array_equal, load_params(again / "run"), first)
    assert (again / "run" / "source" / "config.json").is_file()


# ---- what is not there ---------------------------------------------------------------


REFUSED = """
import json, sys
from diloco_jax import cli
for command in json.loads(sys.argv[1]):
    assert cli.main(command) == 2, command
"""


def test_what_is_not_there_is_named(bucket, root, plain, tmp_path):
    bucket.put(root / "letters", "broken/letters")
    (shard, *_) = [n for n in bucket.names() if n.startswith("broken/letters/train")]
    bucket.delete(shard)
    rows = {
        "gs://bucket/none": "gs://bucket/none is no prepared folder (it has no",
        "gs://nowhere/none": "gs://nowhere/none",
        "s3://bucket/rows": "is a bucket, and rows are read of gs://",
        "gs://bucket/broken/letters": f"{shard} is not the file of prepared.json: ",
    }
    where, commands, shown = ["--workdir", str(tmp_path / "run")], [], [*rows.items()]
    for number, path in enumerate(rows):
        config = config_of(path)
        data = dataclasses.replace(config.run.data, weights=())
        file = tmp_path / f"{number}.json"
        write_config_json(with_run(config, data=data), file)
        commands.append(["run", str(file), *where])
    write_config_json(plain, tmp_path / "config.json")
    for kind in ("hf", "run"):
        coordinator = ["coordinator", str(tmp_path / "config.json"), *where]
        commands.append([*coordinator, "--init", f"{kind}:gs://bucket/none"])
        shown.append(("gs://bucket/none", "is no source of weights"))
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, json.dumps(commands)],
        env={**os.environ, **bucket.environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    said = " ".join(done.stderr.split()).split("error: ")[1:]
    assert len(said) == len(shown), done.stderr
    for one, (path, words) in zip(said, shown, strict=True):
        assert path in one
        assert words in one
    assert not (tmp_path / "run").exists()
