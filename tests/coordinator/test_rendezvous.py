"""Where a new lead finds the workers that were left: the newest lead alone has them."""

from __future__ import annotations

import json
import os
import queue
import shutil
import socket
import subprocess
import sys

import pytest

from diloco_jax import run_files
from diloco_jax.coordinator.workers import rendezvous
from diloco_jax.coordinator.workers.line import write_frame
from diloco_jax.coordinator.workers.rendezvous import Rendezvous, Survivor
from diloco_jax.protocol.holding import BeginWorker, EndWorker, first_number

pytestmark = pytest.mark.skipif(
    not rendezvous.HAS_SURVIVORS, reason="workers end with their lead here"
)
PATIENCE_S = 60.0


class Line:
    """In place of a `WorkerLine`: it says when it breaks."""

    def __init__(self, end: socket.socket | None, heard) -> None:
        self._end, self._heard = end, heard

    def part(self) -> None:
        self._heard.put("parted")

    def close(self) -> None:
        self._end.close()


@pytest.fixture
def place(tmp_path):
    """The place of worker 0 of lead 3, and what it hears."""
    (tmp_path / run_files.WORKERS).mkdir()
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    made = Rendezvous(
        begin(tmp_path, 3, life=2),
        Line(None, heard),
        lambda end: Line(end, heard),
        lambda: heard.put("end"),
    )
    yield made, heard
    made.close()


def begin(workdir, lead, **fields):
    defaults = {
        "config": {},
        "workdir": str(workdir),
        "run_id": "r",
        "worker": 0,
        "fragments": (0,),
        "bind": "127.0.0.1:0",
        "ticket_key": b"",
    }
    return BeginWorker(lead=lead, **{**defaults, **fields})


@pytest.fixture
def say(tmp_path):
    """Says a word at the place; returns the lead's end of the line."""
    ends = []

    def said(message) -> socket.socket:
        reached = rendezvous.reach(tmp_path, 0)
        assert reached is not None
        assert reached.process.pid == os.getpid(), "this process listens"
        ends.append(reached.end)
        write_frame(reached.end, message)
        return reached.end

    yield said
    for end in ends:
        end.close()


def lead_of(made) -> int:
    came = made.await_lead(PATIENCE_S)
    came.line.close()
    return came.begin.lead


def test_leads_of_a_run_are_counted(tmp_path):
    assert [rendezvous.next_lead(tmp_path) for _ in range(3)] == [1, 2, 3]
    first = first_number(3, 1e9)
    assert rendezvous.next_lead(tmp_path, first) == first
    assert rendezvous.next_lead(tmp_path, first_number(3, 1e8)) == first + 1
    assert first_number(4, 0.0) > first, "a lead without its disk opens a term"


@pytest.mark.parametrize("damaged", ["", "[]", '{"lead": "x", "socket": 3}', "{"])
def test_damaged_files_lead_nowhere(tmp_path, damaged):
    (tmp_path / run_files.WORKERS).mkdir()
    for name in ("lead", "0"):
        (tmp_path / run_files.WORKERS / f"{name}.json").write_text(damaged)
    assert rendezvous.next_lead(tmp_path) == 1
    assert rendezvous.reach(tmp_path, 0) is None
    assert rendezvous.last_life(tmp_path, 0) == 0


def test_a_newer_lead_has_the_worker_and_its_line_to_the_older_one_breaks(
    place, say, tmp_path
):
    made, heard = place
    assert rendezvous.are_left(tmp_path)
    assert rendezvous.last_life(tmp_path, 0) == 2
    say(begin(tmp_path, 4))
    assert heard.get(timeout=PATIENCE_S) == "parted"
    assert lead_of(made) == 4
    say(begin(tmp_path, 7))
    assert heard.get(timeout=PATIENCE_S) == "parted"
    assert lead_of(made) == 7


def test_a_lead_that_was_not_taken_yet_gives_way_to_a_newer_one(place, say, tmp_path):
    made, heard = place
    passed_over = say(begin(tmp_path, 4))
    assert heard.get(timeout=PATIENCE_S) == "parted", "that of lead 3"
    say(begin(tmp_path, 7))
    assert heard.get(timeout=PATIENCE_S) == "parted", "that of lead 4"
    passed_over.settimeout(PATIENCE_S)
    assert passed_over.recv(1) == b""
    assert lead_of(made) == 7


@pytest.mark.parametrize("other", [{"lead": 3}, {"lead": 2}, {"run_id": "other"}])
def test_an_older_lead_and_another_run_are_turned_away(place, say, tmp_path, other):
    made, heard = place
    end = say(begin(tmp_path, **{"lead": 9, **other}))
    end.settimeout(PATIENCE_S)
    assert end.recv(1) == b""
    assert heard.empty()
    say(begin(tmp_path, 4))
    assert lead_of(made) == 4


def test_noise_harms_nobody(place, say, tmp_path):
    made, _ = place
    reached = rendezvous.reach(tmp_path, 0)
    reached.end.sendall(b"\x03\x00\x00\x00abc")
    reached.end.close()
    say(begin(tmp_path, 4))
    assert lead_of(made) == 4


def test_a_lead_without_workers_ends_them(place, say, tmp_path):
    _, heard = place
    say(EndWorker())
    assert heard.get(timeout=PATIENCE_S) == "end"


def test_nobody_waits_for_a_lead_beyond_the_time_or_where_it_does_not_come(
    place, say, tmp_path, monkeypatch
):
    made, _ = place
    monkeypatch.setattr(rendezvous, "LOOK_S", 0.01)
    monkeypatch.setattr(rendezvous, "WORD_S", 0.05)
    assert made.await_lead(0.03) is None
    # A newer lead is at work, and reaches another machine's workers.
    folder = tmp_path / run_files.WORKERS
    (folder / "lead.json").write_text(json.dumps({"lead": 4}))
    assert made.await_lead(PATIENCE_S) is None
    shutil.rmtree(tmp_path)
    assert made.await_lead(PATIENCE_S) is None


def test_a_place_that_was_left_leads_nowhere_and_keeps_its_number(place, say, tmp_path):
    made, _ = place
    folder = made._folder
    made.close()
    assert not folder.exists()
    assert rendezvous.reach(tmp_path, 0) is None
    assert not rendezvous.are_left(tmp_path)
    assert rendezvous.last_life(tmp_path, 0) == 2


def test_a_process_that_nobody_here_started_can_be_watched_and_ended():
    waits = [sys.executable, "-c", "input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE) as child:
        found = Survivor(child.pid)
        assert found.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            found.wait(0.01)
        found.kill()
        assert found.wait(PATIENCE_S) == found.poll() == 0
    with pytest.raises(OSError, match="No such process"):
        Survivor(child.pid)
