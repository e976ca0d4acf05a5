"""`diloco simulate calibrate`: what it says, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from virtual_recording import config, known, record

from diloco_jax import cli
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator.roster import Roster
from diloco_jax.observability.tape import Tape, read_tape
from diloco_jax.protocol import records
from diloco_jax.simulation.calibration.command import calibrate_command, fitted
from diloco_jax.simulation.calibration.fit import calibrate
from diloco_jax.simulation.calibration.observed import read_timeline


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    """Of a finished run."""
    folder = tmp_path_factory.mktemp("recorded")
    record(folder)
    return folder


@pytest.fixture
def copied(workdir, tmp_path) -> Path:
    for file in workdir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_command_compares_with_a_run(workdir, tmp_path, capsys):
    other = config(step_s={"a": 0.8, "b": 0.5, "c": 0.9}, faults=("a@40:kill",))
    record(tmp_path / "b", other)
    arguments = ["simulate", "calibrate", str(workdir), "--seeds", "1"]
    assert cli.main([*arguments, "--against", str(tmp_path / "b"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["what"]: row for row in result["predicted"]}
    assert abs(rows["goodput"]["error"]) < 0.02
    assert rows["a: steps"]["measured"] > 40
    assert result["fitted"]["a: step"]["observed"] > 100
    overrides = ["--islands.a.step-seconds", "2.0"]
    assert cli.main([*arguments, *overrides, "--json"]) == 0
    rows = {r["what"]: r for r in json.loads(capsys.readouterr().out)["predicted"]}
    assert rows["a: median_step_seconds"]["predicted"] == pytest.approx(2.01, abs=0.02)
    assert rows["goodput"]["measured"] is None
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "goodput" in err
    assert "coordinator's outage" in err


def refusal(capsys, *arguments: str) -> str:
    assert cli.main(["simulate", "calibrate", *arguments]) == 2
    return capsys.readouterr().err


def test_a_run_that_is_not_over_is_refused(copied, capsys):
    lines = (copied / "tape.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "tape.jsonl").write_bytes(b"".join(lines[:-1]))
    err = refusal(capsys, str(copied))
    assert f"ends after line {len(lines) - 1} without the end of the run" in err
    assert "calibrate on a run that has ended" in err


def write_tape(path: Path, lines: list[dict]) -> None:
    path.unlink()
    tape = Tape(path)
    for line in lines:
        tape.append(line)
    tape.close()


def test_the_time_until_somebody_resumed_the_run_is_no_outage(copied):
    path = copied / "tape.jsonl"
    lines = list(read_tape(path))
    recovered = next(i for i, x in enumerate(lines) if x["kind"] == "recovered")
    left = records.Left(
        island="b",
        incarnation=1,
        steps=0,
        reason="stopped",
        said="",
        settled_steps_by_fragment=(),
        merged_steps=0,
        lost_tokens_by_fragment=(),
        left_behind=(),
    )
    stopped = {**records.line(left), "time": lines[recovered]["time"]}
    before = read_timeline(copied)
    write_tape(path, [*lines[: recovered + 1], stopped, *lines[recovered + 1 :]])
    assert len(before.recoveries) == 1
    assert read_timeline(copied).recoveries == []


def test_when_a_run_began_is_known_although_it_was_stopped(workdir, copied):
    calibration = calibrate(read_timeline(workdir))
    facts = json.loads((copied / "run.json").read_text())
    facts |= {"begun_unix": facts["begun_unix"] + 500, "stopped_seconds": 500.0}
    (copied / "run.json").write_text(json.dumps(facts))
    summary = json.loads((copied / "summary.json").read_text())
    summary["wall_seconds"] -= 500
    (copied / "summary.json").write_text(json.dumps(summary))
    again = dataclasses.asdict(calibrate(read_timeline(copied)))
    np.testing.assert_equal(again, dataclasses.asdict(calibration))


def test_an_edited_tape_is_refused(copied, capsys):
    lines = (copied / "tape.jsonl").read_bytes().splitlines(keepends=True)
    del lines[40]
    (copied / "tape.jsonl").write_bytes(b"".join(lines))
    assert "line 41: it follows a line with hash" in refusal(capsys, str(copied))


def test_a_tape_of_another_version_is_refused(copied, capsys):
    lines = list(read_tape(copied / "tape.jsonl"))
    lines[0]["environment"] = {**lines[0]["environment"], "diloco_jax": "0.0.9"}
    write_tape(copied / "tape.jsonl", lines)
    err = refusal(capsys, str(copied))
    assert "written by diloco_jax 0.0.9" in err
    assert "read it with the version that wrote it" in err


def test_a_config_beside_the_tape_that_is_not_its_own_is_refused(copied, capsys):
    write_config_json(config(total_tokens=7), copied / "config.json")
    assert "bring back the run's own" in refusal(capsys, str(copied))


@pytest.mark.parametrize("name", ["tape.jsonl", "roster.msgpack", "run.json"])
def test_a_folder_without_a_run_is_refused(copied, capsys, name):
    (copied / name).unlink()
    assert f"has no {name}; give the workdir of a run" in refusal(capsys, str(copied))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", b"\xff{}", "run.json cannot be read"),
        ("roster.msgpack", b"", "roster.msgpack cannot be read"),
        ("metrics.jsonl", b"\xff\n", "metrics.jsonl, line 1: not a line of metrics"),
        ("metrics.jsonl", b"[" * 100_000 + b"\n", "metrics.jsonl, line 1: .*Recursion"),
        ("metrics.jsonl", b'{"kind":"merge","fragment":[]}\n', "metrics.jsonl, line 1"),
        ("summary.json", b'{"phase": "done"}', "summary.json is not what a run leaves"),
    ],
)
def test_damaged_files_are_named(copied, capsys, name, content, message):
    (copied / name).write_bytes(content)
    err = refusal(capsys, str(copied))
    assert re.search(message, err)
    assert len(err) < 1000


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("wall_seconds", "x", "(wall_seconds = 'x'; it must be a number)"),
        ("goodput", None, "(goodput = None; it must be a number)"),
        ("islands", [], "(islands = []; it must be an object by name)"),
        ("islands.a", 1, "(islands.a.median_step_seconds = None; it must"),
        ("islands.b.steps", True, "(islands.b.steps = True; it must be a number)"),
    ],
)
def test_what_is_missing_of_a_summary_is_named(copied, capsys, path, value, message):
    whole = section = json.loads((copied / "summary.json").read_text())
    *sections, field = path.split(".")
    for name in sections:
        section = section[name]
    section[field] = value
    (copied / "summary.json").write_text(json.dumps(whole))
    assert message in refusal(capsys, str(copied))


def test_an_island_that_only_the_tape_has_is_named(copied, capsys):
    roster = Roster(copied / "roster.msgpack")
    del roster.members["b"]
    roster.save()
    assert "roster.msgpack does not tell of island 'b'" in refusal(capsys, str(copied))


def test_a_time_that_is_none_is_named(copied, capsys):
    lines = list(read_tape(copied / "tape.jsonl"))
    lines[3]["time"] = "noon"
    write_tape(copied / "tape.jsonl", lines)
    assert "tape.jsonl, line 4: not a record" in refusal(capsys, str(copied))


def test_more_than_can_be_simulated_is_refused(workdir, capsys):
    err = refusal(capsys, str(workdir), "--total-tokens", "1e15")
    assert "steps and takes of islands to simulate, more than 1e+08" in err
    assert "lower total_tokens = 1000000000000000, or --seeds 3" in err
    assert "--seeds 99999999" in refusal(capsys, str(workdir), "--seeds", "99999999")


def test_an_unknown_option_is_one_of_this_command(workdir, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "calibrate", str(workdir), "--islands.zzz.hosts", "2"])
    assert ended.value.code == 2
    err = "".join(capsys.readouterr().err.split())
    assert f"diloco simulate calibrate {workdir} --help".replace(" ", "") in err
    assert "dilocorun" not in err


def test_it_tells_how_far_it_is(workdir, capsys):
    shares = []

    @contextmanager
    def bar(title):
        assert title == "calibrate"
        yield shares.append

    assert calibrate_command([str(workdir), "--seeds", "2", "--json"], bar) == 0
    assert shares == sorted(shares)
    assert len([share for share in shares if share < 0.5]) > 1
    assert {0.5, 1.0} <= set(shares)


# ---- what the recorded run has not seen --------------------------------------------


def test_what_was_not_observed_is_guessed_and_said(tmp_path, capsys):
    record(tmp_path / "run", config(faults=()))
    timeline = read_timeline(tmp_path / "run")
    guessed = {what for what, one in fitted(calibrate(timeline)) if not one.observed}
    assert guessed == {
        *(f"{name}: later join" for name in "abc"),
        "start after an end",
        "its compiling after a return",
        "coordinator's outage",
        "return to it",
    }

    def notes(*faults: str) -> list[str]:
        command = ["simulate", "calibrate", str(tmp_path / "run"), "--seeds", "1"]
        more = ["--faults", *faults] if faults else []
        assert cli.main([*command, "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["notes"]

    assert notes() == []
    (note,) = notes("b@60:kill", "a@60:pause2")
    assert note.startswith("the predicted run has NAME@STEP:kill among its faults")
    assert "guessed are its start 2.0 s, its join 5.1 s; calibrate on" in note
    (note,) = notes("coordinator@50:kill")
    assert "its outage 2.0 s, the return to it 0.0 s, its compiling 6.0 s" in note


def test_a_coordinator_compiles_again_as_islands_do(tmp_path):
    record(tmp_path / "run", config(faults=("b@60:kill",)))
    found = calibrate(read_timeline(tmp_path / "run")).recompiled_s
    assert found.value == pytest.approx(6.0 * 3.0 / 5.0, rel=0.05)
    assert not found.observed


def test_another_state_of_the_compilation_cache_is_said(workdir, tmp_path, capsys):
    record(tmp_path / "cold", join_s={n: known(20.0) for n in ("", "a", "b", "c")})

    def notes(*arguments: object) -> list[str]:
        command = ["simulate", "calibrate", *map(str, arguments), "--seeds", "1"]
        assert cli.main([*command, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["notes"]

    cold = tmp_path / "cold"
    assert notes(cold) == []
    (note,) = notes(cold, "--against", workdir)
    assert f"first joins in {cold} took 20.1 s, first joins in {workdir} 5.1" in note
    (note,) = notes(cold, "--seed", "5")
    assert "took 20.1 s, later ones 3.1 s" in note
    assert notes(workdir, "--seed", "5") == []


def test_what_cannot_be_predicted_is_refused(workdir, capsys):
    faults = ["--faults", "coordinator@9:pause3"]
    assert "paused is not predicted" in refusal(capsys, str(workdir), *faults)
    both = ["--against", str(workdir), "--config", "x.py"]
    assert "brings its own config" in refusal(capsys, str(workdir), *both)
    assert "--seeds 0" in refusal(capsys, str(workdir), "--seeds", "0")
