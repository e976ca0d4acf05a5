"""`diloco simulate calibrate`: what it says, and what it refuses."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from pathlib import Path

import pytest
from virtual_recording import config, record

from diloco_jax import cli
from diloco_jax.config.loading import write_config_json
from diloco_jax.coordinator.roster import Roster
from diloco_jax.observability.tape import Tape, closed_segments, read_tape
from diloco_jax.simulation.calibration import command
from diloco_jax.simulation.calibration.command import calibrate_command
from diloco_jax.simulation.calibration.fit import calibrate


@pytest.fixture(scope="module")
def workdir(tmp_path_factory) -> Path:
    """Workdir of a finished run."""
    folder = tmp_path_factory.mktemp("recorded")
    record(folder)
    return folder


@pytest.fixture
def copied(workdir, tmp_path) -> Path:
    for file in workdir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_the_command_compares_with_the_run(workdir, capsys):
    arguments = ["simulate", "calibrate", str(workdir), "--seeds", "1"]
    assert cli.main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    rows = {row["what"]: row for row in result["predicted"]}
    assert abs(rows["goodput"]["error"]) < 0.02
    assert rows["a: steps"]["measured"] > 40
    assert result["fitted"]["a: transfer_s"]["observed"] > 10
    overrides = ["--islands.a.step-seconds", "2.0"]
    assert cli.main([*arguments, *overrides, "--json"]) == 0
    rows = {r["what"]: r for r in json.loads(capsys.readouterr().out)["predicted"]}
    assert rows["a: median_step_seconds"]["predicted"] == pytest.approx(2.01, abs=0.02)
    assert rows["goodput"]["measured"] is None
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "goodput" in err
    assert "outage_s" in err


def refusal(capsys, *arguments: str) -> str:
    assert cli.main(["simulate", "calibrate", *arguments]) == 2
    return capsys.readouterr().err


def test_a_run_that_is_not_over_is_refused(copied, capsys):
    lines = (copied / "tape.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "tape.jsonl").write_bytes(b"".join(lines[:-1]))
    err = refusal(capsys, str(copied))
    assert "lacks the end of the run ('finished')" in err
    assert "calibrate on a run that has ended" in err


def write_tape(path: Path, lines: list[dict], segment_bytes: int = 1 << 20) -> None:
    path.unlink()
    tape = Tape(path, segment_bytes)
    for line in lines:
        tape.append(line)
    tape.close()


def test_a_tape_in_many_files_gives_the_same_numbers(workdir, copied):
    write_tape(copied / "tape.jsonl", list(read_tape(workdir / "tape.jsonl")), 10_000)
    assert len(closed_segments(copied / "tape.jsonl")) > 3
    assert calibrate(copied).transfer_s == calibrate(workdir).transfer_s


def test_of_a_run_that_was_stopped_an_outage_is_guessed(workdir, copied):
    assert calibrate(workdir).outage_s.observed == 1
    facts = json.loads((copied / "run.json").read_text())
    (copied / "run.json").write_text(json.dumps({**facts, "stopped_seconds": 500.0}))
    stopped = calibrate(copied).outage_s
    assert stopped.observed == 0
    assert stopped.value == pytest.approx(7.0, abs=0.1), "a start and a join"


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
    write_config_json(config(seed=7), copied / "config.json")
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
        ("summary.json", b'{"phase": "done"}', "summary.json is not what a run leaves"),
    ],
)
def test_damaged_files_are_named(copied, capsys, name, content, message):
    (copied / name).write_bytes(content)
    err = refusal(capsys, str(copied))
    assert re.search(message, err)
    assert len(err) < 1000


@pytest.mark.parametrize(
    ("field", "value"), [("goodput", None), ("islands", []), ("islands", {"a": 1})]
)
def test_a_summary_that_is_not_what_a_run_leaves_is_refused(
    copied, capsys, field, value
):
    summary = json.loads((copied / "summary.json").read_text())
    (copied / "summary.json").write_text(json.dumps({**summary, field: value}))
    assert "summary.json is not what a run leaves" in refusal(capsys, str(copied))


def test_a_run_without_steps_is_refused(copied, capsys):
    roster = Roster(copied / "roster.msgpack")
    roster.members.clear()
    roster.save()
    assert "tells of no step of a, b, c; calibrate on" in refusal(capsys, str(copied))


def test_a_time_that_is_none_is_named(copied, capsys):
    lines = list(read_tape(copied / "tape.jsonl"))
    lines[3]["time"] = "noon"
    write_tape(copied / "tape.jsonl", lines)
    assert "tape.jsonl, line 4: not a record" in refusal(capsys, str(copied))


def test_more_than_can_be_simulated_is_refused(workdir, capsys):
    err = refusal(capsys, str(workdir), "--total-tokens", "1e15")
    assert "steps to simulate, more than 1e+08" in err
    assert "lower total_tokens = 1000000000000000" in err


def test_an_unknown_option_is_one_of_this_command(workdir, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["simulate", "calibrate", str(workdir), "--islands.zzz.hosts", "2"])
    assert ended.value.code == 2
    err = "".join(capsys.readouterr().err.split())
    assert f"diloco simulate calibrate {workdir} --help".replace(" ", "") in err
    assert "dilocorun" not in err


def test_it_tells_how_far_it_is(workdir, capsys, monkeypatch):
    shares, read = [], []

    @contextmanager
    def bar(title):
        assert title in ("reading the tape", "calibrate")
        yield shares.append if title == "calibrate" else read.append

    monkeypatch.setattr(command, "bar", bar)
    assert calibrate_command([str(workdir), "--seeds", "2", "--json"]) == 0
    assert shares == sorted(shares)
    assert len([share for share in shares if share < 0.5]) > 1
    assert {0.5, 1.0} <= set(shares)


def test_what_was_not_observed_is_a_guess(tmp_path, capsys):
    record(tmp_path / "run", config(faults=()))
    calibration = calibrate(tmp_path / "run")
    guessed = {what for what, one in calibration.fitted() if not one.observed}
    assert guessed == {"away_s", "outage_s"}
    assert cli.main(["simulate", "calibrate", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().err.count("0: a guess") == 2


def test_what_cannot_be_predicted_is_refused(workdir, capsys):
    faults = ["--faults", "coordinator@9:pause3"]
    assert "a paused coordinator is not predicted" in refusal(
        capsys, str(workdir), *faults
    )
    assert "--seeds 0" in refusal(capsys, str(workdir), "--seeds", "0")
