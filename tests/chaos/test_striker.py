"""A schedule is carried out on real processes, which only sleep."""

import json
import signal
import subprocess
import sys
import time

import pytest

from diloco_jax import run_files
from diloco_jax.chaos.schedule import parse_strikes
from diloco_jax.chaos.striker import Striker
from diloco_jax.files import write_json
from diloco_jax.observability.tape import Tape

PATIENCE_S = 30.0
ISLANDS = ("a", "b")


@pytest.fixture
def children(tmp_path):
    """Processes of both islands, as `diloco run` notes them."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    made = {n: subprocess.Popen(command, start_new_session=True) for n in ISLANDS}
    write_json({n: [c.pid] for n, c in made.items()}, tmp_path / run_files.PROCESSES)
    yield made
    for child in made.values():
        child.kill()
        child.wait()


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


def test_only_links_that_are_struck_go_through_a_relay(tmp_path, children):
    striker, said = begin(tmp_path, "b@0s:partition500")
    address = "127.0.0.1:9"
    assert striker.route(tmp_path, "a", address) == address
    through = striker.route(tmp_path, "b", address)
    assert through != address
    assert striker.route(tmp_path, "b", address) == through
    until(lambda: said)
    striker.close()


def test_nothing_is_struck_before_the_first_merge(tmp_path, children):
    said = []
    strikes = parse_strikes(["a@0s:kill"], ISLANDS)
    striker = Striker(strikes, ISLANDS, said.append)
    striker.route(tmp_path, "a", "127.0.0.1:9")
    striker.close()
    assert children["a"].poll() is None
    assert not said
