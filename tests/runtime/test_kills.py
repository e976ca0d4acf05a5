"""Hosts of an island and the coordinator are killed in one real run, and nothing is
harmed."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import one_truth
import pytest
import support
import tape_checks
from runtime_support import Stall, replayed
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.observability.tape import Tape, closed_segments, remove_tape

pytestmark = [pytest.mark.dist, pytest.mark.timing]

CYCLE_STEPS = 6
STEP_SECONDS, TRAINING_SECONDS = 0.4, 60
TIMEOUT_S = 240
GAP_MEDIANS_MAX, STALLED_MAX = 3.0, 0.05
BATCH = 4
KILL_COMMITTED, KILL_PREPARED = 44, 58
"""Merges after whose commit, and after whose preparation, the coordinator is killed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def stall() -> Stall:
    """Stall of this machine during the run."""
    return Stall()


@pytest.fixture(scope="module")
def run(folder, stall) -> support.Run:
    """Done; host 1 of island b was killed, host 0 of its next attempt, and the
    coordinator between committed and sent, and between prepared and committed."""
    (folder / "text").mkdir()
    numbers = np.random.default_rng(0)
    for index in range(20):
        line = " ".join(str(n) for n in numbers.integers(0, 99, 2000))
        (folder / "text" / f"{index}.txt").write_text(line)
    steps = round(TRAINING_SECONDS / STEP_SECONDS)
    island = IslandConfig(batch_size=BATCH, step_seconds=STEP_SECONDS)
    config = Config(
        run=RunConfig(
            model=MODEL,
            data=DataConfig(paths=(str(folder / "text"),), validation_fraction=0.1),
            sync=SyncConfig(steps_per_cycle=CYCLE_STEPS, fragments=3, quorum=1),
            sequence_length=SEQUENCE_LENGTH,
            total_tokens=2 * steps * BATCH * SEQUENCE_LENGTH,
        ),
        islands={"a": island, "b": dataclasses.replace(island, hosts=2, mesh_fsdp=4)},
        placement=Placement(
            faults=(
                "b/1@15:kill",
                "b/0#2@15:kill",
                f"coordinator@{KILL_COMMITTED}:kill",
                f"coordinator@{KILL_PREPARED}:kill-prepared",
            ),
            snapshot_every_s=4.0,
            checkpoint_every_s=1.0,
        ),
    )
    with stall, pytest.MonkeyPatch.context() as patch:
        # With nothing in it, so that only b's first lives compile for the last one.
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder / "cache"))
        return support.run_in(config.validate(), folder, TIMEOUT_S)


def test_the_faults_struck_and_everybody_came_back(run):
    islands = run.summary["islands"]
    assert {name: i["joins"] for name, i in islands.items()} == {"a": 1, "b": 3}
    assert len(tape_checks.outage_seconds(run.tape)) == 2
    assert run.summary["phase"] == "done"


def test_no_step_waited_for_a_dead_process(run, stall):
    a = run.summary["islands"]["a"]
    longest_s = GAP_MEDIANS_MAX * a["median_step_seconds"] + stall.longest_s
    assert a["max_step_gap_seconds"] <= longest_s
    assert a["stalled_seconds"] <= STALLED_MAX * a["step_seconds"]


def test_an_outage_has_one_length_and_goodput_one_value(run):
    lengths = one_truth.check(run.workdir)
    assert {name: len(found) for name, found in lengths.items()} == {
        "b": 2,
        "coordinator": 2,
    }
    assert lengths["coordinator"] == tape_checks.outage_seconds(run.tape)


def test_no_version_goes_back(run):
    assert tape_checks.version_problems(run.tape) == []


def test_the_ledger_balances_with_the_tape(run):
    sizes = support.fragment_sizes(run.config)
    assert tape_checks.ledger_problems(run.summary, run.tape, sizes) == []
    lost = run.summary["islands"]["b"]["tokens_lost"]
    assert set(lost) == {"died", told_by_the_survivor(run.tape)}
    assert run.summary["islands"]["a"]["tokens_lost"] == {}


def told_by_the_survivor(tape: list[dict]) -> str:
    """Reason of the end by host 1's death: "failed" if a collective told host 0 of it
    before it was ended too, else "died", as where host 0 itself is killed."""
    (end,) = (
        r
        for r in tape
        if (r["kind"], r.get("island"), r.get("incarnation")) == ("left", "b", 1)
    )
    if end["reason"] != "died":
        assert end["reason"] == "failed"
        assert "Gloo" in end["said"], "another host is gone, and nothing else"
    return end["reason"]


@pytest.mark.parametrize("incarnation", [2, 3])
def test_the_killed_island_is_merged_again_within_a_cycle(run, incarnation):
    steps = tape_checks.steps_to_first_merge(run.tape, "b", incarnation)
    assert steps <= CYCLE_STEPS


def test_no_host_compiles_anything_when_the_island_is_back(run, folder):
    for name in ("b", "b.1"):
        log = (run.workdir / "logs" / f"{name}.log").read_text()
        ends = re.findall(r"ends: .*; (\d+) programs compiled, (\d+) read", log)
        compiled, read = map(int, ends[-1])
        assert compiled == 0 < read
    # Checkpoints are copied to the host and back, which takes no program.
    assert not list(folder.glob("cache/*device_put*"))
    assert list(folder.glob("cache/jit_take-*"))


def test_islands_of_one_host_and_of_two_are_merged_together(run):
    """Their steps take the same time, but two hosts take later than they are asked."""
    for name, island in run.summary["islands"].items():
        assert island["participation"] >= 0.8, name


# ---- the run once more, from config, text and tape alone -----------------------------


@pytest.fixture
def workdir(run, folder, tmp_path) -> Path:
    """Copy the workdir's files that replay needs."""
    for name in ("config.json", "tape.jsonl"):
        shutil.copy(folder / "run" / name, tmp_path / name)
    return tmp_path


def test_the_killed_island_goes_on_with_its_moments(run):
    told = [r for r in run.tape if r["kind"] == "island"]
    restored = {
        (r["island"], r["incarnation"], r["record"]["start"]): r["record"]["value"]
        for r in told
        if r["record"]["kind"] == "restored" and r["record"]["fragment"] < 0
    }
    assert set(restored) == {("b", 2, 1), ("b", 3, 2)}
    assert all(0 < steps <= 15 for steps in restored.values())


def write_tape(workdir: Path, records: list[dict[str, Any]]) -> None:
    """Replace the tape by these records, in files of 10 kB."""
    remove_tape(workdir / "tape.jsonl")
    tape = Tape(workdir / "tape.jsonl", 10_000)
    for record in records:
        tape.append(record)
    tape.close()
    assert len(closed_segments(workdir / "tape.jsonl")) > 5


def test_replay_gives_the_bits_of_every_merge(run, workdir):
    committed, prepared = (r for r in run.tape if r["kind"] == "recovered")
    after = run.tape[run.tape.index(committed) :]
    restored = {r["fragment"]: r for r in reversed(after) if r["kind"] == "restored"}
    assert len(restored) == len(committed["versions"])
    merges = sum(r["snapshot"][1] for r in restored.values())
    assert 0 < merges < KILL_COMMITTED, "both halves of a recovery"
    assert sum(version[1] for version in committed["versions"]) == KILL_COMMITTED
    assert prepared["discarded"] >= 1
    assert sum(version[1] for version in prepared["versions"]) == KILL_PREPARED - 1
    write_tape(workdir, run.tape)
    assert replayed(workdir)["merges"] == run.summary["merges"]
