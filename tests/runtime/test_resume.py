"""One real run with everything that may happen to it, and each part of what it leaves.

Two unequal islands train on a packed mixture of prepared folders, in fragments so small
that tensors are cut into bands. One is killed; then every process is, and the newest
snapshots are damaged. Other islands on other meshes go on to the end, and then to twice
the tokens. The whole of it is replayed from its tape.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import support
import tape_checks
from runtime_support import (
    await_gone,
    await_that,
    coordinator,
    diloco,
    make_config,
    replayed,
    with_run,
)
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
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.coordinator.snapshots import (
    fragment_path,
    state_path,
    states,
    versions,
)
from diloco_jax.core.inner import learning_rate
from diloco_jax.core.tiles import digest_all
from diloco_jax.data.loading import load_data
from diloco_jax.data.source import Shares
from diloco_jax.models.model import split_batch
from diloco_jax.observability.tape import read_tape
from diloco_jax.simulation.replay.recording import read_recording
from diloco_jax.workdir import read_facts

pytestmark = pytest.mark.dist

TIMEOUT_S = 240.0
MERGES = 16
TOTAL, MORE = 1600 * SEQUENCE_LENGTH, 1200 * SEQUENCE_LENGTH
"""Far more tokens than the first two islands have made when they are killed."""
DOCUMENTS = 24
WEIGHTS = (2.0, 1.0)
ROWS = {("a", 1): 2, "b": 2, "a": 32, "c": 2}
"""Rows of a step, by island; of the first incarnation of a, fewer."""


def rows_of(island: str, incarnation: int) -> int:
    return ROWS.get((island, incarnation), ROWS[island])


def prepared(folder: Path) -> tuple[str, ...]:
    """Prepare two folders of documents whose lengths differ."""
    paths = []
    for name in ("numbers", "letters"):
        lines = [
            f'{{"text": "{name} {n} {n * n} {chr(97 + n % 26) * (n % 30)}"}}\n'
            for n in range(DOCUMENTS)
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        paths.append(str(folder / name))
        command = ["data", "prepare", paths[-1], f"{paths[-1]}.jsonl"]
        length = ["--sequence-length", str(SEQUENCE_LENGTH), "--workers", "1"]
        assert cli.main([*command, *length, "--validation-fraction", "0.1"]) == 0
    return tuple(paths)


def start(folder: Path, *options: object) -> subprocess.Popen[bytes]:
    with (folder / "diloco.log").open("ab") as log:
        return subprocess.Popen(
            [*support.DILOCO, "run", *map(str, options)], stdout=log, stderr=log
        )


def end(folder: Path, process: subprocess.Popen[bytes]) -> None:
    try:
        code = process.wait(TIMEOUT_S)
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
    assert code == 0, (folder / "diloco.log").read_text()[-3000:]


def await_merges(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """Until the tape has MERGES and some of both lives of b, each island a checkpoint,
    and the coordinator two."""
    tape = folder / "run" / "tape.jsonl"
    checkpoints = folder / "run" / run_files.CHECKPOINTS

    def happened() -> bool:
        assert process.poll() is None, (folder / "diloco.log").read_text()[-3000:]
        lines = tape.read_bytes().splitlines() if tape.exists() else []
        merged = [line for line in lines if line.startswith(b'{"kind":"merged"')]
        back = any(b'"island":"b","incarnation":2' in line for line in merged)
        found = checkpoints.glob("islands/*/*")
        saved = {path.parent.name for path in found if path.name.isdigit()}
        ours = checkpoints / "coordinator"
        again = len(states(ours)) > 1 and len(versions(ours, 0)) > 1
        return len(merged) >= MERGES and back and saved >= {"a", "b"} and again

    await_that(happened, TIMEOUT_S)


@dataclasses.dataclass(frozen=True)
class Resumed:
    folder: Path
    config: Config
    """Of the islands that went on."""
    digest: str
    """Digest of the global parameters that the killed run left."""
    versions: list[list[int]]
    torn: int
    """The number of its newest snapshot of the state."""
    first: dict
    """Summary of the first end, before the run was extended."""
    seconds: float
    """Seconds from the begin to the first end, without the stop."""
    stopped: float
    """Seconds that the run stood still, as the run says."""
    shown: str
    """What the extension printed."""

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
def resumed(tmp_path_factory) -> Resumed:
    """Island b was killed after 8 steps, and later everything; a on two hosts and c
    went on."""
    folder = tmp_path_factory.mktemp("resume")
    island = IslandConfig(batch_size=2, step_seconds=0.3)
    config = Config(
        run=RunConfig(
            model=MODEL,
            data=DataConfig(paths=prepared(folder), weights=WEIGHTS),
            inner=InnerConfig(learning_rate=1e-2, warmup_fraction=0, rewarm_steps=0),
            sync=SyncConfig(steps_per_cycle=8, fragments=8, quorum=1),
            sequence_length=SEQUENCE_LENGTH,
            total_tokens=TOTAL,
        ),
        # Two rounds of a step have documents, and so predictions, unequally.
        islands={"a": dataclasses.replace(island, accumulation=2), "b": island},
        placement=Placement(
            faults=("b@8:kill",), checkpoint_every_s=0.5, snapshot_every_s=1.0
        ),
    ).validate()
    write_config_json(config, folder / "two.json")
    workdir = folder / "run"
    process = start(folder, folder / "two.json", "--workdir", workdir)
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
    config = read_config_json(workdir / "config.json")
    # What another coordinator makes of what is there.
    shutil.copytree(workdir, folder / "copy")
    with coordinator(config, folder / "copy", init=False, killed=True) as service:
        digest = once_back(service)
        reached = [list(f.version) for f in service.lead.state.fragments]
    others = {
        # About 50 steps to the end: whichever begins first, the other is in time.
        "a": IslandConfig(batch_size=32, hosts=2, mesh_fsdp=2, step_seconds=0.3),
        "c": IslandConfig(batch_size=2, step_seconds=0.3),
    }
    placement = dataclasses.replace(config.placement, faults=())
    config = dataclasses.replace(config, islands=others, placement=placement)
    write_config_json(config.validate(), folder / "others.json")
    end(folder, start(folder, folder / "others.json", "--resume", workdir))
    first = json.loads((workdir / "summary.json").read_bytes())
    stopped = read_facts(workdir).stopped_seconds
    ended = (workdir / "summary.json").stat().st_mtime
    seconds = ended - read_facts(folder / "copy").begun_unix - stopped
    more = diloco("run", "--resume", workdir, "--total-tokens", TOTAL + MORE)
    return Resumed(
        folder, config, digest, reached, torn, first, seconds, stopped, more.stderr
    )


def test_it_goes_on_from_the_same_global_parameters(resumed):
    recovered, _ = (r for r in resumed.tape if r["kind"] == "recovered")
    assert digest_after(resumed.tape, recovered) == resumed.digest
    assert recovered["versions"] == resumed.versions
    assert recovered["snapshot"] < resumed.torn
    logs = (resumed.workdir / "logs").glob("coordinator*.log")
    told = "".join(path.read_text() for path in logs)
    assert f"global parameters {resumed.digest}" in told
    assert tape_checks.version_problems(resumed.tape) == []


def test_the_ledger_balances_over_the_kill_and_the_stops(resumed):
    sizes = support.fragment_sizes(resumed.config)
    assert tape_checks.ledger_problems(resumed.summary, resumed.tape, sizes) == []
    islands = resumed.summary["islands"]
    assert {name: i["joins"] for name, i in islands.items()} == {"a": 3, "b": 2, "c": 2}
    assert set(islands["b"]["tokens_lost"]) == {"died", "stopped"}
    assert islands["b"]["tokens_merged"] > 0
    assert islands["c"]["tokens_merged"] > 0


def test_it_ends_as_if_it_had_not_been_stopped(resumed):
    summary = resumed.first
    assert summary["phase"] == "done"
    assert summary["tokens_computed"] >= TOTAL
    assert math.isfinite(summary["eval_loss"])
    assert summary["eval_bits_per_byte"] is not None
    # The time for which it stood still is not counted; the second time came later.
    assert tape_checks.outage_seconds(resumed.tape) == []
    stood_still = next(
        after["time"] - before["time"]
        for before, after in itertools.pairwise(resumed.tape)
        if after["kind"] == "recovered"
    )
    assert resumed.stopped > stood_still / 2
    assert summary["wall_seconds"] <= resumed.seconds + 1.0


def test_an_island_takes_its_moments_to_another_mesh_and_host_count(resumed):
    restored = [
        (r["island"], r["incarnation"], r["record"]["value"] > 0)
        for r in resumed.tape
        if r["kind"] == "island"
        and r["record"]["kind"] == "restored"
        and r["record"]["fragment"] < 0
    ]
    assert ("a", 2, True) in restored
    log = (resumed.workdir / "logs" / "a.1.log").read_text()
    assert "restored the moments of incarnation 1" in log


def once_back(service: Coordinator) -> str:
    """The digest of the parameters, once all fragments are back."""
    await_that(service.holder.digest, TIMEOUT_S)
    return service.holder.digest()


def digest_after(tape: list[dict], recovered: dict) -> str:
    """The digest of the parameters with which a coordinator came back."""
    found: dict[int, str] = {}
    for record in tape[tape.index(recovered) :]:
        if record["kind"] == "restored":
            found.setdefault(record["fragment"], record["digest"])
    return digest_all(found[fragment] for fragment in sorted(found))


# ---- its extension, and its replay ---------------------------------------------------


def test_the_extension_ends_with_all_its_tokens(resumed):
    first, summary = resumed.first, resumed.summary
    config = read_config_json(resumed.workdir / "config.json")
    assert config.run.total_tokens == TOTAL + MORE
    assert summary["phase"] == "done"
    assert first["tokens"] < TOTAL + MORE <= summary["tokens"]
    assert summary["merges"] > first["merges"]
    kinds = [r["kind"] for r in resumed.tape]
    assert kinds.count("extended") == 1
    assert kinds.count("finished") == 2
    _, recovered = (r for r in resumed.tape if r["kind"] == "recovered")
    assert digest_after(resumed.tape, recovered) == first["parameters_digest"]
    goes_on = learning_rate(config.run.inner, first["tokens"] / (TOTAL + MORE))
    assert f"which ended at 0.001, goes on from {goes_on:.3g}\n" in resumed.shown
    assert goes_on > 0.002


def test_replay_repeats_all_parts_bit_for_bit(resumed):
    lives = read_recording(resumed.workdir).lives.values()
    assert {life.total_tokens for life in lives} == {TOTAL, TOTAL + MORE}
    assert replayed(resumed.workdir)["merges"] == resumed.summary["merges"]


# ---- its rows ------------------------------------------------------------------------


def leased(tape):
    """Positions leased to each incarnation, in the order of their use."""
    found = {}
    for record in tape:
        if record["kind"] == "granted":
            key = (record["island"], record["incarnation"])
            positions = range(record["start"], record["stop"])
            found.setdefault(key, []).extend(positions)
    return found


def trained(tape):
    """Positions of the steps of each incarnation up to its last one in a merge."""
    last = {}
    for record in tape:
        if record["kind"] == "merged":
            for part in record["contributions"]:
                key = (part["island"], part["incarnation"])
                last[key] = max(last.get(key, 0), part["end"])
    positions = leased(tape)
    return {key: positions[key][: n * rows_of(*key)] for key, n in last.items()}


def test_tokens_are_positions_and_predictions_are_counted_apart(resumed):
    train = load_data(resumed.config.run).train
    rows = [
        {name: a[None] for name, a in dict(train[n]).items()} for n in range(len(train))
    ]
    counts = [int(split_batch(row)[2].sum()) for row in rows]
    islands = resumed.summary["islands"]
    island = islands["c"]  # It was never killed: its measures are whole.
    done = island["steps"] * ROWS["c"]
    assert island["tokens_per_step"] == ROWS["c"] * SEQUENCE_LENGTH
    assert island["tokens_computed"] == done * SEQUENCE_LENGTH > 0
    assert min(counts) * done <= island["tokens_predicted"] <= max(counts) * done
    predicted = sum(island["tokens_predicted"] for island in islands.values())
    assert resumed.summary["tokens_predicted"] == predicted
    assert predicted < resumed.summary["tokens_computed"]


def test_rows_of_each_folder_are_those_that_were_trained_on(resumed):
    summary = resumed.summary
    rows = summary["rows_by_source"]
    assert list(rows) == list(resumed.config.run.data.paths)
    numbers, letters = rows.values()
    lost = sum(summary["tokens_lost"].values())
    settled = (numbers + letters) * SEQUENCE_LENGTH
    # Steps that are lost in every fragment come back; others are trained on.
    assert summary["tokens_computed"] - lost <= settled <= summary["tokens_computed"]
    shares, used = Shares(WEIGHTS), [0, 0]
    for positions in trained(resumed.tape).values():
        for position in positions:
            used[shares.draw(position)[0]] += 1
    assert used == [numbers, letters]
    assert abs(numbers - 2 * letters) <= 3 * max(ROWS.values())


def test_no_position_is_leased_while_somebody_may_have_it(resumed):
    assert tape_checks.row_problems(resumed.tape) == []


# ---- what cannot go on ------------------------------------------------------------


def test_a_finished_run_says_so_and_changes_nothing(resumed, capsys):
    before = resumed.summary
    assert cli.main(["run", "--resume", str(resumed.workdir), "--json"]) == 0
    shown = capsys.readouterr()
    assert "the run in it is finished" in shown.err
    assert json.loads(shown.out) == before == resumed.summary


def refused(capsys, *arguments: object) -> str:
    assert cli.main(["run", *map(str, arguments)]) == 2
    return capsys.readouterr().err


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


def test_snapshots_of_another_model_are_refused_with_both(text, tmp_path, capsys):
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
