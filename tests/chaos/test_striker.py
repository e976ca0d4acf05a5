"""A schedule is carried out on real processes, which only sleep."""

import json
import signal
import subprocess
import sys
import time

import pytest

from diloco_jax import run_files
from diloco_jax.chaos import strike
from diloco_jax.chaos.schedule import parse_strikes
from diloco_jax.chaos.strike import Striker, _acts
from diloco_jax.cluster.processes import signal_group
from diloco_jax.observability.tape import JsonLines, Tape

PATIENCE_S = 30.0
ISLANDS = ("a", "b")


def begin(tmp_path, *texts):
    """A striker of a run that has merged already, and the texts that it says."""
    said = []
    striker = Striker(parse_strikes(texts, ISLANDS), ISLANDS, said.append)
    striker.route(tmp_path, "a", "127.0.0.1:9")
    assert not said
    tape = Tape(tmp_path / run_files.TAPE)
    tape.append({"kind": "merged"})
    tape.close()
    return striker, said


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(child):
    with open(f"/proc/{child.pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_a_kill_meets_its_victim_alone_and_is_noted(tmp_path, children):
    striker, said = begin(tmp_path, "a@0s:kill", "coordinator@0.1s:kill")
    assert children["a"].wait(PATIENCE_S) == -signal.SIGKILL
    until(lambda: len(said) == 2)
    striker.close()
    assert children["b"].poll() is None
    assert said[1] == "coordinator@0.1s:kill; not running: coordinator"
    lines = (tmp_path / run_files.CHAOS).read_text().splitlines()
    first, second = map(json.loads, lines)
    assert (first["who"], first["kind"], first["missed"]) == (["a"], "kill", [])
    assert second["missed"] == ["coordinator"]


@linux
def test_a_stop_ends_by_itself(tmp_path, children):
    striker, said = begin(tmp_path, "b@0s:stop0.3")
    until(lambda: said)
    until(lambda: len(said) == 2)
    assert said[1] == "b@0s:stop0.3 is over"
    until(lambda: state(children["b"]) == "S")
    striker.close()


@linux
def test_what_is_stopped_goes_on_when_the_striker_is_closed(tmp_path, children):
    striker, said = begin(tmp_path, "a+b@0s:stop500")
    until(lambda: said and {state(c) for c in children.values()} == {"T"})
    striker.close()
    until(lambda: {state(c) for c in children.values()} == {"S"})


@linux
def test_what_is_slowed_runs_and_stops_in_turn(tmp_path, children):
    striker, said = begin(tmp_path, "a@0s:slow500=0.5")
    for expected in ("T", "S", "T", "S"):
        until(lambda expected=expected: state(children["a"]) == expected)
    assert state(children["b"]) == "S"
    striker.close()
    until(lambda: state(children["a"]) == "S")
    assert len(said) == 1


def test_acts_of_a_slow_strike_end_with_it():
    strikes = parse_strikes(["a@1s:slow0.5=0.25", "b@1.5s:kill"], ISLANDS)
    acts = [(round(at, 2), what) for at, what, _ in _acts(strikes)]
    assert acts == [
        *[(1.0, "begin"), (1.15, "go on"), (1.2, "stop"), (1.35, "go on")],
        *[(1.4, "stop"), (1.5, "end"), (1.5, "begin")],
    ]


def test_a_full_disk_is_noted_when_it_has_space_again(tmp_path, children, monkeypatch):
    full = []
    append = JsonLines.append

    def refuse(notes, record):
        if full:
            raise OSError("no space left")
        append(notes, record)

    monkeypatch.setattr(strike, "fill", lambda folder: full.append(folder) or True)
    monkeypatch.setattr(strike, "free", lambda folder: full.clear())
    monkeypatch.setattr(JsonLines, "append", refuse)
    striker, said = begin(tmp_path, "coordinator@0s:full0.3", "a@0.1s:kill")
    until(lambda: len(said) == 3)
    striker.close()
    lines = (tmp_path / run_files.CHAOS).read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["full", "kill"]
    assert said[-1] == "coordinator@0s:full0.3 is over"


def test_what_a_killed_one_took_of_the_disk_is_given_back(tmp_path, children):
    (tmp_path / strike.BALLAST).touch()
    begin(tmp_path, "a@0s:kill")[0].close()
    assert not (tmp_path / strike.BALLAST).exists()


def test_a_large_disk_is_never_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(strike, "LARGEST_BYTES", 0)
    assert not strike.fill(tmp_path)
    assert list(tmp_path.iterdir()) == []
    strike.free(tmp_path)


def test_only_links_that_are_struck_go_through_a_relay(tmp_path, children):
    striker, said = begin(tmp_path, "b@0s:partition500")
    address = "127.0.0.1:9"
    assert striker.route(tmp_path, "a", address) == address
    through = striker.route(tmp_path, "b", address)
    assert through != address
    assert striker.route(tmp_path, "b", address) == through
    until(lambda: said)
    striker.close()


def test_a_number_that_leads_no_group_is_another_process_by_now():
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        assert not signal_group(child.pid, signal.SIGKILL)
        child.communicate(b"\n", 30.0)
    assert child.returncode == 0
