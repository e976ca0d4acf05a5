"""`diloco simulate faults`: exit codes, JSON, and the command that repeats."""

import json
import os
import shlex
import signal
from collections.abc import Iterator

import pytest
from interruption import until_it_is_raised
from plants import planted

from diloco_jax.cli import main
from diloco_jax.simulation.faults import play
from diloco_jax.simulation.faults.play import Played
from diloco_jax.simulation.faults.schedule import Schedule

SCHEDULE = {"islands": {"a": {}}, "total_tokens": 100}
LEAVE = {"kind": "leave", "at_s": 1, "island": "a", "away_s": 1}
A = {"at_s": 1, "island": "a"}
RESTART = {"at_s": 1, "restart": {"down_s": 1}}
KEYS = {"schedules", "violations", "seconds", "schedules_per_minute", "faults"}


def test_nothing_violated_is_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "faults", "--seeds", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result.keys() >= KEYS | {"merges", "crashes"}
    assert (result["schedules"], result["violations"]) == (3, [])


def test_a_violation_is_exit_1_and_its_command_repeats_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with planted("stale_deltas_are_merged"):
        assert main(["simulate", "faults", "--seeds", "1", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["violations"][0]
    assert (found["seed"], found["invariant"]) == (0, "stale")
    diloco, *again = shlex.split(found["command"])
    assert diloco == "diloco"
    assert json.loads(again[again.index("--schedule") + 1]) == found["shortest"]
    with planted("stale_deltas_are_merged"):
        assert main(again) == 1
    told = capsys.readouterr().err
    assert "violates stale" in told
    assert "again: diloco simulate faults" in told


FAULTS = ["simulate", "faults"]


@pytest.fixture
def fenced_ones_come_in() -> Iterator[None]:
    """Seed 1 violates the invariant durable; 2, 4, 8, 11 and 12 violate fenced."""
    with planted("fenced_ones_come_in"):
        yield


def interrupt() -> None:
    """Asks this process to end, and goes on until that is raised."""
    os.kill(os.getpid(), signal.SIGINT)
    until_it_is_raised()


@pytest.mark.usefixtures("fenced_ones_come_in")
def test_ctrl_c_leaves_what_was_found_and_where_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: dict[int, str] = {}
    play_seed = play.play_seed

    def played(seed: int) -> Played:
        told[seed] = capsys.readouterr().err
        if seed == 3:
            interrupt()
        return play_seed(seed)

    monkeypatch.setattr(play, "play_seed", played)
    assert main([*FAULTS, "--json"]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert [found["seed"] for found in report["violations"]] == [1, 2]
    assert (report["schedules"], report["next_seed"]) == (3, 3)
    assert err == "error: interrupted\n"
    assert "seed 2 violates fenced" in told[3], "as soon as it is found"
    assert main(FAULTS) == 1
    err = capsys.readouterr().err
    assert "3 schedules in" in err
    assert "2 violations\nto go on: --first-seed 3\nerror: interrupted" in err


@pytest.mark.usefixtures("fenced_ones_come_in")
def test_ctrl_c_while_a_schedule_is_shortened_leaves_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def shortest(schedule: Schedule, fails: object) -> Schedule:
        interrupt()
        return schedule

    monkeypatch.setattr(play, "shortest", shortest)
    assert main(FAULTS) == 1
    told = capsys.readouterr().err
    assert "seed 1 violates durable" in told
    assert "--seeds 1 --first-seed 1" in told
    assert "1 violations\nto go on: --first-seed 2\nerror: interrupted" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0"], "seeds = 0; it must be at least 1"),
        (["--seeds", "9" * 20], "seeds = " + "9" * 20),
        (["--first-seed", "-1"], "first_seed = -1"),
        (["--schedule", "{}"], "--schedule is not a schedule"),
        *(
            (["--schedule", json.dumps({**SCHEDULE, **changes})], message)
            for changes, message in (
                ({"islands": {}}, "0 islands and 2 fragments"),
                ({"fragment_sizes": []}, "1 islands and 0 fragments"),
                ({"fragment_sizes": [1, 0]}, "fragment_sizes (1, 0)"),
                ({"steps_per_cycle": 0}, "steps_per_cycle = 0"),
                ({"total_tokens": -5}, "total_tokens = -5"),
                ({"grace": -3}, "grace = -3"),
                ({"latency_s": -1}, "latency_s = -1"),
                ({"islands": {"a": {"step_s": 0}}}, "step_s = 0"),
                ({"islands": {"a": {"batch_size": 0}}}, "batch_size = 0"),
                ({"quorum": 2}, "quorum 2 and 1 islands"),
                ({"fault": []}, "unknown field `fault`"),
                ({"faults": [{"kind": "flood", "at_s": 1}]}, "flood"),
                ({"faults": [{**LEAVE, "away_s": -9}]}, "away_s = -9"),
                ({"faults": [{**LEAVE, "island": "x"}]}, "faults of islands ['x']"),
                ({"total_tokens": 10**11}, "total_tokens = 100000000000 takes"),
                ({"islands": {"a": {"step_s": 1e9}}}, "total_tokens = 100 takes"),
                ({"islands": {"a": {"lookahead": 10**11}}}, "lookahead = 100"),
                ({"islands": {"a": {"batch_size": 10**11}}}, "batch_size = 10000"),
            )
        ),
        *(
            (["--schedule", json.dumps({**SCHEDULE, "faults": [fault]})], message)
            for fault, message in (
                ({**LEAVE, "at_s": 1e6}, "at_s = 1000000.0; it must be at least 0, at"),
                ({**LEAVE, "away_s": 1e6}, "away_s = 1000000.0"),
                ({"kind": "impostor", **A, "behind": 7}, "behind = 7"),
                ({"kind": "step_jump", **A, "for_s": 1, "factor": 0}, "factor = 0.0"),
                ({"kind": "partition", **A, "for_s": 1, "ways": []}, "ways = []"),
                ({"kind": "coordinator_crash", **RESTART, "effects": -3}, "effects = "),
                ({"kind": "torn_write", **RESTART, "appends": -1}, "appends = -1"),
                ({"kind": "disk_failure", **RESTART, "appends": 10**9}, "appends = 1"),
                *(
                    ({"kind": "torn_write", **RESTART, "written_share": share}, "share")
                    for share in (0, 1, 5)
                ),
                (
                    {"kind": "disk_lost", "at_s": 1, "restart": {"down_s": 1e9}},
                    "down_s = 1000000000.0",
                ),
                (
                    {"kind": "disk_lost", "at_s": 1, "restart": {"down_s": 1, "x": 1}},
                    "unknown field `x`",
                ),
            )
        ),
        *(
            (
                [option, "7", "--schedule", json.dumps(SCHEDULE)],
                f"{option} 7 with --sch",
            )
            for option in ("--seeds", "--first-seed")
        ),
    ],
)
def test_bad_input_is_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "faults", *arguments]) == 2
    assert message in capsys.readouterr().err
