"""The coordinator is killed, its folder is gone: islands' anchors begin a new term.

Island a has two hosts, which send their parts of an anchor; b has one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import support
import tape_checks
from runtime_support import Stall, await_that, placed, started
from training_support import CYCLE_STEPS, lasting

from diloco_jax.cluster import cluster
from diloco_jax.cluster.cluster import free_port
from diloco_jax.config import Config
from diloco_jax.config.loading import write_config_json
from diloco_jax.config.placement import Deadlines
from diloco_jax.observability.tape import read_tape
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import WireError

pytestmark = [pytest.mark.dist, pytest.mark.timing]

TRAINING_SECONDS = 24
BUDGET_S, TIMEOUT_S = 6.0, 150.0
MERGES_BEFORE = 10
GAP_MEDIANS_MAX, STALLED_MAX = 3.0, 0.05


class Survived(NamedTuple):
    """The results of the two lives of the coordinator."""

    config: Config
    run_ids: tuple[str, str]
    before: list[dict[str, Any]]
    """The tape that is gone."""
    tape: list[dict[str, Any]]
    summary: dict[str, Any]
    log: str


def await_training(address: str) -> None:
    """Returns once every island has made a cycle's steps, and merges are made."""
    client = Client(address, tls=None, deadlines=Deadlines(BUDGET_S), bulk_channels=1)

    def trains() -> bool:
        with contextlib.suppress(WireError):
            status = client.status(1.0)
            steps = [island["steps"] for island in status["islands"].values()]
            trained = len(steps) == 2 and min(steps) > CYCLE_STEPS
            return trained and status["merges"] >= MERGES_BEFORE
        return False

    with contextlib.closing(client):
        await_that(trains, TIMEOUT_S)


@pytest.fixture(scope="module")
def stall() -> Stall:
    """Stall of this machine during the run."""
    return Stall()


@pytest.fixture(scope="module")
def survived(text, tmp_path_factory, stall) -> Survived:
    folder = tmp_path_factory.mktemp("lost")
    state, log = folder / "state", folder / "coordinator.log"
    config = lasting(text, TRAINING_SECONDS)
    first = dataclasses.replace(config.islands["a"], hosts=2, mesh_fsdp=2)
    config = placed(
        dataclasses.replace(config, islands={**config.islands, "a": first}),
        time_budget_s=BUDGET_S,
        evaluate_every_steps=0,
    )
    path = folder / "config.json"
    write_config_json(config, path)
    address = f"127.0.0.1:{free_port()}"
    serve = [*support.DILOCO, "coordinator", str(path), "--workdir", str(state)]
    serve += ["--bind", address]
    islands_folder = folder / "islands"
    islands_folder.mkdir()
    write_config_json(config, islands_folder / "config.json")
    at_coordinator = cluster.coordinator_environment()
    at_island = cluster.island_environment()
    with stall, contextlib.ExitStack() as running:
        command = [*serve, "--init"]
        first = running.enter_context(started(command, log, **at_coordinator))
        trained = [
            running.enter_context(started(train, folder / f"{name}.log", **at_island))
            for name, island in config.islands.items()
            for train in cluster.island_commands(
                islands_folder, name, island.hosts, address, 1
            )
        ]
        await_training(address)
        first.kill()
        first.wait()
        run_id = json.loads((state / "run.json").read_bytes())["run_id"]
        before = list(read_tape(state / "tape.jsonl"))
        shutil.rmtree(state)
        second = running.enter_context(started(serve, log, **at_coordinator))
        assert second.wait(TIMEOUT_S) == 0, log.read_text()
        assert [host.wait(TIMEOUT_S) for host in trained] == [0, 0, 0]
    return Survived(
        config=config,
        run_ids=(run_id, json.loads((state / "run.json").read_bytes())["run_id"]),
        before=before,
        tape=list(read_tape(state / "tape.jsonl")),
        summary=json.loads((state / "summary.json").read_bytes()),
        log=log.read_text(),
    )


def adopted(tape: list[dict[str, Any]]) -> Iterator[tuple[str, int, list[int]]]:
    """Island, fragment and version of what was adopted, in order."""
    for record in tape:
        if record["kind"] == "island" and record["record"]["kind"] == "adopted":
            told = record["record"]
            yield record["island"], told["fragment"], told["version"]


def test_the_run_goes_on_in_a_new_term_to_its_end(survived):
    first, second = survived.run_ids
    assert first == second
    assert set(survived.tape[0]["from"]) == {"a", "b"}
    assert survived.tape[0]["kind"] == "term"
    assert survived.summary["term"] == 2
    assert survived.summary["phase"] == "done"
    assert survived.summary["merges"] >= MERGES_BEFORE
    assert {i["joins"] for i in survived.summary["islands"].values()} == {1}


def test_nothing_that_an_island_had_adopted_is_gone(survived):
    newest: dict[int, list[int]] = {}
    for _, fragment, version in adopted(survived.before):
        newest[fragment] = max(newest.get(fragment, version), version)
    assert len(newest) == 3
    for fragment, version in newest.items():
        assert survived.tape[0]["replaced"][fragment] >= version
        term, number = survived.tape[0]["versions"][fragment]
        assert [term, number] >= [2, version[1]]


def test_no_version_goes_back_on_an_island(survived):
    assert tape_checks.version_problems(survived.tape) == []
    seen: dict[tuple[str, int], list[int]] = {}
    for island, fragment, version in adopted([*survived.before, *survived.tape]):
        before = seen.get((island, fragment), [0, 0])
        # What was not acknowledged is told once more.
        assert version >= before
        seen[island, fragment] = version
    assert {version[0] for version in seen.values()} == {2}


def test_the_ledger_balances_with_what_is_carried(survived):
    sizes = support.fragment_sizes(survived.config)
    summary = survived.summary
    assert tape_checks.ledger_problems(summary, survived.tape, sizes) == []
    assert all(i["tokens_carried"] > 0 for i in summary["islands"].values())
    assert summary["tokens_merged"] > 0
    assert set(summary["tokens_lost"]) <= {"stale"}


def test_no_step_is_merged_that_an_earlier_merge_had(survived):
    tape = [r for r in survived.before if r["kind"] == "merged"] + survived.tape
    assert tape_checks.interval_problems(tape) == []


def test_no_data_is_granted_twice(survived):
    spans = sorted(
        (record["start"], record["stop"])
        for record in [*survived.before, *survived.tape]
        if record["kind"] == "granted"
    )
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_progress_goes_on(survived):
    total = survived.config.run.total_tokens
    assert 0 < survived.tape[0]["tokens"] < total
    (stopping,) = (r for r in survived.tape if r["kind"] == "stopping")
    assert total <= stopping["tokens"] < 1.2 * total


def test_goodput_is_of_the_time_that_is_counted(survived):
    assert 0.7 < survived.summary["goodput"] < 1.05
    assert 0 < survived.summary["uptime"] <= 1.05


def test_no_step_waited(survived, stall):
    for island in survived.summary["islands"].values():
        gap, median = island["max_step_gap_seconds"], island["median_step_seconds"]
        assert gap <= GAP_MEDIANS_MAX * median + stall.longest_s
        assert island["stalled_seconds"] <= STALLED_MAX * island["step_seconds"]
