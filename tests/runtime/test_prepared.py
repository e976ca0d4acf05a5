"""A real run on a mixture of prepared folders, in which an island is killed."""

from __future__ import annotations

import dataclasses
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
from diloco_jax.data.shares import Shares

pytestmark = pytest.mark.dist

TIMEOUT_S = 240
BATCH, STEPS = 4, 60
WEIGHTS = (2.0, 1.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> support.Run:
    """Done; island b was killed after 8 steps."""
    folder: Path = tmp_path_factory.mktemp("prepared")
    paths = []
    for name in ("numbers", "letters"):
        lines = [
            f'{{"text": "{name} {n} {n * n} {chr(97 + n % 26) * (n % 30)}"}}\n'
            for n in range(150)
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
            total_tokens=2 * STEPS * BATCH * SEQUENCE_LENGTH,
        ),
        islands={"a": island, "b": dataclasses.replace(island, batch_size=2)},
        placement=Placement(faults=("b@8:kill",), checkpoint_every_s=1.0),
    )
    return support.run_in(config.validate(), folder, TIMEOUT_S)


def test_the_ledger_balances_and_the_island_came_back(run):
    joins = {name: i["joins"] for name, i in run.summary["islands"].items()}
    assert joins == {"a": 1, "b": 2}
    sizes = support.fragment_sizes(run.config)
    assert tape_checks.ledger_problems(run.summary, run.tape, sizes) == []
    assert run.summary["phase"] == "done"
    assert run.summary["eval_bits_per_byte"] is not None


def granted(tape):
    """Spans leased to each incarnation, in order."""
    found = {}
    for record in tape:
        if record["kind"] == "granted":
            key = (record["island"], record["incarnation"])
            found.setdefault(key, []).append((record["start"], record["stop"]))
    return found


def test_rows_of_each_folder_are_those_that_were_trained_on(run):
    rows, summary = run.summary["rows_by_source"], run.summary
    assert list(rows) == list(run.config.run.data.paths)
    numbers, letters = rows.values()
    lost = sum(summary["tokens_lost"].values())
    trained = (numbers + letters) * SEQUENCE_LENGTH
    # Steps that are lost in every fragment come back; others are trained on.
    assert summary["tokens_computed"] - lost <= trained <= summary["tokens_computed"]
    assert abs(numbers - 2 * letters) <= 3 * BATCH
    # By hand, from the tape: b's first life has what it merged, the rest came back.
    batch = {"a": BATCH, "b": 2}
    last = {}
    for record in run.tape:
        if record["kind"] == "merged":
            for part in record["contributions"]:
                key = (part["island"], part["incarnation"])
                last[key] = max(last.get(key, 0), part["end"])
    used, shares = [0, 0], Shares(WEIGHTS)
    for key, spans in granted(run.tape).items():
        left = last.get(key, 0) * batch[key[0]]
        for start, stop in spans:
            stop = min(stop, start + left)
            left -= stop - start
            for number, count in enumerate(shares.drawn(start, stop)):
                used[number] += count
    assert used == [numbers, letters]


def test_no_row_is_leased_twice_but_those_that_came_back(run):
    held = {}
    for key, spans in granted(run.tape).items():
        for start, stop in spans:
            for position in range(start, stop):
                held.setdefault(position, []).append(key)
    twice = {position for position, keys in held.items() if len(keys) > 1}
    assert twice  # The killed island held a lease.
    for position in twice:
        assert held[position][0] == ("b", 1)
        assert len(held[position]) == 2
