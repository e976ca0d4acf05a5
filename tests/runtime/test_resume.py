"""A run whose every process was killed goes on, with other islands on other meshes."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import support
import tape_checks
from runtime_support import await_gone, coordinator, make_config, with_run
from tiny import SEQUENCE_LENGTH

from diloco_jax import cli, run_files
from diloco_jax.config import Config, IslandConfig, Placement
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator.snapshots import (
    fragment_path,
    state_path,
    states,
    versions,
)
from diloco_jax.observability.tape import newest_record, read_tape
from diloco_jax.workdir import read_facts

pytestmark = pytest.mark.dist

TIMEOUT_S = 240.0
MERGES = 8


def start(folder: Path, config: Path, *options: str) -> subprocess.Popen[bytes]:
    with (folder / "diloco.log").open("ab") as log:
        return subprocess.Popen(
            [*support.DILOCO, "run", str(config), *options], stdout=log, stderr=log
        )


def await_merges(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Until the tape has MERGES, each island a checkpoint, and the coordinator two."""
    tape = folder / "run" / "tape.jsonl"
    checkpoints = folder / "run" / run_files.CHECKPOINTS
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        merges = tape.exists() and tape.read_bytes().count(b'{"kind":"merged"')
        found = checkpoints.glob("islands/*/*")
        saved = collections.Counter(p.parent.name for p in found if p.name.isdigit())
        ours = checkpoints / "coordinator"
        again = len(states(ours)) > 1 and len(versions(ours, 0)) > 1
        if merges >= MERGES and saved["a"] and saved["b"] and again:
            return
        assert process.poll() is None, (folder / "diloco.log").read_text()[-3000:]
        time.sleep(0.05)
    raise AssertionError(f"no {MERGES} merges and checkpoints within {TIMEOUT_S} s")


@dataclasses.dataclass(frozen=True)
class Resumed:
    folder: Path
    config: Config
    digest: str
    """Digest of the global parameters that the killed run left."""
    versions: list[list[int]]
    torn: int
    """The number of its newest snapshot of the state."""

    @property
    def workdir(self) -> Path:
        return self.folder / "run"

    @property
    def tape(self) -> list[dict]:
        return list(read_tape(self.workdir / "tape.jsonl"))

    @property
    def summary(self) -> dict:
        return json.loads((self.workdir / "summary.json").read_bytes())


@pytest.fixture(scope="module")
def resumed(text, tmp_path_factory) -> Resumed:
    """Islands a and b of one device each are killed, with everything else, and the
    newest snapshots of the state and of one fragment are damaged; a on two hosts and c
    go on to the end."""
    folder = tmp_path_factory.mktemp("resume")
    config = make_config(text, fragments=3, steps_per_cycle=6, quorum=1)
    # Far more than two such islands have done when they are killed.
    config = with_run(config, total_tokens=3200 * SEQUENCE_LENGTH)
    island = IslandConfig(batch_size=1, step_seconds=0.1)
    placement = Placement(checkpoint_every_s=0.5, snapshot_every_s=1.0)
    config = dataclasses.replace(
        config, islands={"a": island, "b": island}, placement=placement
    ).validate()
    write_config_json(config, folder / "two.json")
    workdir = folder / "run"
    process = start(folder, folder / "two.json", "--workdir", str(workdir))
    try:
        await_merges(folder, process)
        pids = json.loads((workdir / run_files.PROCESSES).read_bytes()).values()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(TIMEOUT_S)
    await_gone([pid for hosts in pids for pid in hosts])
    snapshots = workdir / run_files.CHECKPOINTS / "coordinator"
    torn = states(snapshots)[-1]
    state_path(snapshots, torn).write_bytes(b"")
    fragment_path(snapshots, 0, versions(snapshots, 0)[-1]).write_bytes(b"")
    # What another coordinator makes of what is there.
    shutil.copytree(workdir, folder / "copy")
    with coordinator(config, folder / "copy", init=False, killed=True) as service:
        digest = service.holder.store.digest()
        reached = [list(f.version) for f in service.lead.state.fragments]
    others = {
        # About 50 steps to the end: whichever begins first, the other is in time.
        "a": IslandConfig(batch_size=64, hosts=2, mesh_fsdp=2, step_seconds=0.3),
        "c": IslandConfig(batch_size=1, step_seconds=0.3),
    }
    config = dataclasses.replace(config, islands=others).validate()
    write_config_json(config, folder / "others.json")
    process = start(folder, folder / "others.json", "--resume", str(workdir))
    try:
        code = process.wait(TIMEOUT_S)
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
    assert code == 0, (folder / "diloco.log").read_text()[-3000:]
    return Resumed(folder, config, digest, reached, torn)


def test_it_goes_on_from_the_same_global_parameters(resumed):
    (recovered,) = (r for r in resumed.tape if r["kind"] == "recovered")
    assert recovered["parameters_digest"] == resumed.digest
    assert recovered["versions"] == resumed.versions
    assert recovered["snapshot"] < resumed.torn
    assert resumed.digest in (resumed.folder / "diloco.log").read_text()
    assert tape_checks.version_problems(resumed.tape) == []


def test_the_ledger_balances_over_the_stop(resumed):
    sizes = support.fragment_sizes(resumed.config)
    assert tape_checks.ledger_problems(resumed.summary, resumed.tape, sizes) == []
    islands = resumed.summary["islands"]
    assert {name: i["joins"] for name, i in islands.items()} == {"a": 2, "b": 1, "c": 1}
    assert set(islands["b"]["tokens_lost"]) == {"stopped"}
    assert islands["b"]["tokens_merged"] > 0
    assert islands["c"]["tokens_merged"] > 0


def test_it_ends_as_if_it_had_not_been_stopped(resumed):
    summary = resumed.summary
    assert summary["phase"] == "done"
    assert summary["tokens_computed"] >= resumed.config.run.total_tokens
    assert math.isfinite(summary["eval_loss"])
    # The time for which it stood still is not counted.
    began = read_facts(resumed.folder / "copy").begun_unix
    ended = (resumed.workdir / "summary.json").stat().st_mtime
    stopped = read_facts(resumed.workdir).stopped_seconds
    assert stopped > max(tape_checks.outage_seconds(resumed.tape)) / 2
    assert summary["wall_seconds"] <= ended - began - stopped + 1.0


def test_an_island_takes_its_moments_to_another_mesh_and_host_count(resumed):
    restored = [
        (r["island"], r["incarnation"], r["record"]["value"] > 0)
        for r in resumed.tape
        if r["kind"] == "island"
        and r["record"]["kind"] == "restored"
        and r["record"]["fragment"] < 0
    ]
    assert restored == [("a", 2, True)]
    log = (resumed.workdir / "logs" / "a.1.log").read_text()
    assert "restored the moments of incarnation 1" in log


def test_a_finished_run_says_so_and_changes_nothing(resumed, capsys):
    before = resumed.summary
    assert cli.main(["run", "--resume", str(resumed.workdir), "--json"]) == 0
    shown = capsys.readouterr()
    assert "the run in it is finished" in shown.err
    assert json.loads(shown.out) == before == resumed.summary


# ---- what cannot go on ------------------------------------------------------------


def refused(capsys, *arguments: object) -> str:
    assert cli.main(["run", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_other_settings_are_refused_with_both_values(resumed, capsys):
    before = (resumed.workdir / "config.json").read_bytes()
    seed = resumed.config.run.seed
    shown = refused(capsys, "--resume", resumed.workdir, "--seed", seed + 1)
    assert f"seed: {seed} in the run, {seed + 1} in the config" in shown
    assert "begin a new run" in shown
    assert (resumed.workdir / "config.json").read_bytes() == before


def test_a_workdir_without_a_run_is_refused(capsys, tmp_path, resumed):
    config = resumed.folder / "others.json"
    shown = refused(capsys, config, "--resume", tmp_path)
    assert f"{tmp_path} holds no run" in shown
    shown = refused(capsys, config, "--resume", tmp_path / "none")
    assert "there is no such folder" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_served_is_refused(resumed, text, tmp_path, capsys):
    config = make_config(text)
    with coordinator(config, tmp_path / "run") as service:
        shown = refused(capsys, "--resume", tmp_path / "run")
        assert f"{tmp_path / 'run'} is in use by a coordinator, process " in shown
        address = (tmp_path / "run" / "coordinator.address").read_text()
        assert address == service.address


def test_another_text_is_refused_before_anything_is_written(text, tmp_path, capsys):
    with coordinator(make_config(text), tmp_path / "run"):
        pass
    before = {p: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.txt").write_text("another text " * 1000)
    options = ["--resume", tmp_path / "run", "--data.paths", other]
    shown = refused(capsys, *options)
    assert f"the corpus here ({other}) has" in " ".join(shown.split())
    assert "give the run's text (--data.paths)" in " ".join(shown.split())
    after = {p: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
    assert after == before


def test_snapshots_of_another_model_are_refused_with_both(
    resumed, text, tmp_path, capsys
):
    config = make_config(text)
    for name, seed in (("one", 0), ("two", 1)):
        with coordinator(with_run(config, seed=seed), tmp_path / name):
            pass
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    shutil.copytree(tmp_path / "two" / "checkpoints", tmp_path / "one" / "checkpoints")
    before = (tmp_path / "one" / "summary.json").read_bytes()
    shown = refused(capsys, "--resume", tmp_path / "one")
    assert "seed: 0 here, 1 there (here: this run's)" in shown
    assert (tmp_path / "one" / "summary.json").read_bytes() == before


def test_a_graceful_stop_and_its_resumption_have_one_digest(text, tmp_path):
    config = make_config(text)
    with coordinator(config, tmp_path):
        pass
    stopped = json.loads((tmp_path / "summary.json").read_bytes())
    with coordinator(config, tmp_path, init=False, killed=True) as service:
        assert service.holder.store.digest() == stopped["parameters_digest"]
    recovered = newest_record(tmp_path / "tape.jsonl", "recovered")
    assert recovered["parameters_digest"] == stopped["parameters_digest"]
    assert stopped["phase"] == "stopped"
