"""A real run on a mixture of prepared folders: an island is killed, and others go on
to more tokens."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
import support
import tape_checks
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax import cli
from diloco_jax.config import (
    Config,
    DataConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.config.loading import read_config_json, write_config_json
from diloco_jax.data.loading import load_data
from diloco_jax.data.source import Shares
from diloco_jax.observability.tape import read_tape

pytestmark = pytest.mark.dist

TIMEOUT_S = 240
BATCH, STEPS = 4, 60
BATCHES = {"a": BATCH, "b": 2, "c": 3}
DOCUMENTS = 24
WEIGHTS = (2.0, 1.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> support.Run:
    """Done twice over: island b was killed after 8 steps; then the run went on to twice
    the tokens with a and c."""
    folder: Path = tmp_path_factory.mktemp("prepared")
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
        fraction = ["--validation-fraction", "0.1"]
        assert cli.main([*command, *length, *fraction]) == 0
    island = IslandConfig(batch_size=BATCH, step_seconds=0.2)
    config = Config(
        run=RunConfig(
            model=MODEL,
            data=DataConfig(paths=tuple(paths), weights=WEIGHTS),
            sync=SyncConfig(steps_per_cycle=6, fragments=3, quorum=1),
            sequence_length=SEQUENCE_LENGTH,
            total_tokens=STEPS * BATCH * SEQUENCE_LENGTH,
        ),
        islands={"a": island, "b": dataclasses.replace(island, batch_size=2)},
        placement=Placement(faults=("b@8:kill",), checkpoint_every_s=1.0),
    )
    first = support.run_in(config.validate(), folder, TIMEOUT_S)
    config = read_config_json(first.workdir / "config.json")
    islands = {"a": island, "c": dataclasses.replace(island, batch_size=3)}
    placement = dataclasses.replace(config.placement, faults=())
    config = dataclasses.replace(config, islands=islands, placement=placement)
    write_config_json(config, folder / "others.json")
    total = ["--total-tokens", str(2 * config.run.total_tokens)]
    goes_on = [str(folder / "others.json"), "--resume", str(first.workdir), *total]
    subprocess.run([*support.DILOCO, "run", *goes_on], check=True, timeout=TIMEOUT_S)
    return dataclasses.replace(
        first,
        config=read_config_json(first.workdir / "config.json"),
        summary=json.loads((first.workdir / "summary.json").read_bytes()),
        tape=list(read_tape(first.workdir / "tape.jsonl")),
    )


def test_the_ledger_balances_after_a_kill_and_a_change_of_islands(run):
    joins = {name: i["joins"] for name, i in run.summary["islands"].items()}
    assert (joins["a"], joins["c"]) == (2, 1)
    assert run.summary["islands"]["b"]["tokens_lost"]["died"] > 0
    sizes = support.fragment_sizes(run.config)
    assert tape_checks.ledger_problems(run.summary, run.tape, sizes) == []
    assert run.summary["phase"] == "done"
    assert run.summary["eval_bits_per_byte"] is not None


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
    return {key: positions[key][: n * BATCHES[key[0]]] for key, n in last.items()}


def test_rows_of_each_folder_are_those_that_were_trained_on(run):
    rows, summary = run.summary["rows_by_source"], run.summary
    assert list(rows) == list(run.config.run.data.paths)
    numbers, letters = rows.values()
    lost = sum(summary["tokens_lost"].values())
    settled = (numbers + letters) * SEQUENCE_LENGTH
    # Steps that are lost in every fragment come back; others are trained on.
    assert summary["tokens_computed"] - lost <= settled <= summary["tokens_computed"]
    shares, used = Shares(WEIGHTS), [0, 0]
    for positions in trained(run.tape).values():
        for position in positions:
            used[shares.draw(position)[0]] += 1
    assert used == [numbers, letters]
    assert abs(numbers - 2 * letters) <= 3 * BATCH


def test_no_row_is_trained_on_twice_in_an_epoch(run):
    """Over several epochs of each folder, with islands that are killed, come and go.
    The tape says which positions were trained on; the data, which rows those are."""
    positions = [p for some in trained(run.tape).values() for p in some]
    rows, shares = load_data(run.config.run), Shares(WEIGHTS)
    mixture = rows.index(run.config.run.seed)
    seen: dict[tuple[int, int], list[bytes]] = {}
    for position in positions:
        source, draw = shares.draw(position)
        epoch = draw // len(rows.mixed[source])
        row = mixture[position]["tokens"].tobytes()
        seen.setdefault((source, epoch), []).append(row)
    for source, part in enumerate(rows.mixed):
        epochs = [found for (s, _), found in seen.items() if s == source]
        assert len(epochs) > 2
        known = {part[row]["tokens"].tobytes() for row in range(len(part))}
        assert len(known) == len(part)
        assert any(len(found) == len(part) for found in epochs)
        for found in epochs:
            assert len(set(found)) == len(found)
            assert set(found) <= known


def test_what_was_leased_twice_had_come_back(run):
    held: dict[int, list[tuple[str, int]]] = {}
    for key, positions in leased(run.tape).items():
        for position in positions:
            held.setdefault(position, []).append(key)
    twice = {position for position, keys in held.items() if len(keys) > 1}
    assert twice  # The killed island held a lease.
    used = trained(run.tape)
    for position in twice:
        *before, _ = held[position]
        assert not any(position in used.get(key, ()) for key in before)
