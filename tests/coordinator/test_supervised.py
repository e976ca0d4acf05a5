"""A worker's process that ends again and again, or whose line does.

A script stands in for a process here, and a thread for one on another machine.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import queue
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from diloco_jax.config import Config, ConfigError, Placement
from diloco_jax.coordinator.workers import places, supervised
from diloco_jax.coordinator.workers.line import read_frame, write_frame
from diloco_jax.coordinator.workers.places import OpenLine
from diloco_jax.coordinator.workers.process import sign_of_life
from diloco_jax.coordinator.workers.supervised import Supervised
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.protocol.holding import (
    BeginWorker,
    Forget,
    FragmentsRestored,
    HolderTroubled,
    RestoreFragments,
    WorkerFailed,
    WorkerServes,
)

PATIENCE_S = 60.0
SERVES_AND_ENDS = """
import socket, sys
from diloco_jax.coordinator.workers.line import read_frame, write_frame
from diloco_jax.protocol.holding import FragmentsRestored
from diloco_jax.protocol.holding import WorkerServes

end = socket.socket(fileno=int(sys.argv[1]))
read_frame(end), read_frame(end)
restored = FragmentsRestored(fragments=(), discarded=0, environment={})
write_frame(end, restored)
write_frame(end, WorkerServes(address="127.0.0.1:7079"))
"""
TELLS_WHAT_IT_FORGETS = """
import socket, sys
from diloco_jax.coordinator.workers.line import read_frame, write_frame
from diloco_jax.protocol.holding import Forget, FragmentsRestored, HolderTroubled
from diloco_jax.protocol.holding import EndWorker, WorkerServes, to_worker

end = socket.socket(fileno=int(sys.argv[1]))
read_frame(end), read_frame(end)
restored = FragmentsRestored(fragments=(), discarded=0, environment={})
write_frame(end, restored)
write_frame(end, WorkerServes(address="127.0.0.1:7079"))
while not isinstance(message := to_worker(read_frame(end)), EndWorker):
    if isinstance(message, Forget):
        text = f"{message.island} before {message.before}"
        write_frame(end, HolderTroubled(text=text))
"""
FAILS = """
import errno, socket, sys
from diloco_jax.coordinator.workers.line import read_frame, write_frame
from diloco_jax.protocol.holding import WorkerFailed

end = socket.socket(fileno=int(sys.argv[1]))
read_frame(end), read_frame(end)
write_frame(end, WorkerFailed(text="its disk is read-only", errno=errno.EROFS))
"""
NOTHING = RestoreFragments(fragments=())


class OtherMachine:
    """In place of `Elsewhere`: each line breaks as soon as the worker has spoken."""

    patience_s, pid, ends_with_line = PATIENCE_S, 0, False
    processes: Iterator[str]
    """Which process speaks on each line; empty: none does."""
    serves: Iterator[bool] = itertools.repeat(True)
    """Whether the worker serves before the line breaks."""
    last_word = ""
    """The worker's or the outpost's, before each line breaks."""
    number = 0
    """Number of the system's error that it tells; 0: none."""
    lines = 0

    def __init__(self, *_) -> None: ...

    def open(self, begin: BeginWorker, *_) -> OpenLine:
        OtherMachine.lines += 1
        own, other = socket.socketpair()
        threading.Thread(target=self._speak, args=(other,)).start()
        return OpenLine(own, begin, True)

    def _speak(self, end: socket.socket) -> None:
        with end, contextlib.suppress(OSError):  # The lead may part it.
            read_frame(end), read_frame(end)
            process, serves = next(self.processes), next(self.serves)
            if process:
                write_frame(end, replace(sign_of_life(), process=process))
            if process and serves:
                restored = FragmentsRestored(fragments=(), discarded=0, environment={})
                write_frame(end, restored)
                write_frame(end, WorkerServes(address="127.0.0.1:7079"))
            if self.last_word:
                write_frame(end, WorkerFailed(text=self.last_word, errno=self.number))

    def silent_s(self) -> float:
        return math.inf

    def address_of(self, bound: str) -> str:
        return bound

    def end(self, *, kill: bool) -> None: ...


@pytest.fixture
def begun(monkeypatch):
    """Makes a worker that may be started again once; what it says, and its failure."""
    made = []

    def make(**changes) -> tuple[Supervised, queue.SimpleQueue[Any]]:
        placement = Placement(restarts=1, restart_delay_s=0.0, **changes)
        begin = BeginWorker(
            config={},
            workdir="",
            run_id="r",
            worker=0,
            fragments=(0,),
            bind="127.0.0.1:7079",
            ticket_key=b"",
        )
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        worker = Supervised(begin, Config(placement=placement), heard.put, heard.put)
        made.append(worker)
        return worker, heard

    yield make
    for worker in made:
        worker.end()
        worker.join(PATIENCE_S)


@pytest.fixture
def ending(begun, monkeypatch):
    """A worker on this machine whose processes end as soon as they serve."""
    monkeypatch.setattr(places, "COMMAND", (sys.executable, "-c", SERVES_AND_ENDS))
    return begun(bind="127.0.0.1:7077", advertise="coordinator.example:9077")


@pytest.fixture
def breaking(begun, monkeypatch):
    """Makes a worker on another machine, to which lines break; see `OtherMachine`."""

    def make(
        processes: Iterator[str], **facts
    ) -> tuple[Supervised, queue.SimpleQueue[Any]]:
        facts |= {"processes": processes, "lines": 0}
        for name, fact in facts.items():
            monkeypatch.setattr(OtherMachine, name, fact, raising=False)
        monkeypatch.setattr(supervised, "Elsewhere", OtherMachine)
        worker, heard = begun(workers=2, worker_addresses=("a:1", "b:2"))
        worker.begin(NOTHING)
        worker.restored(PATIENCE_S)
        return worker, heard

    return make


def test_a_worker_that_ends_again_and_again_is_given_up(ending):
    worker, heard = ending
    worker.begin(NOTHING)
    worker.restored(PATIENCE_S)
    assert heard.get(timeout=PATIENCE_S) == WorkerAway(worker=0)
    worker.begin(NOTHING)
    assert heard.get(timeout=PATIENCE_S) == WorkerBack(worker=0)
    failure = heard.get(timeout=PATIENCE_S)
    assert "worker 0 failed 2 times in a row, placement.restarts = 1" in str(failure)


def test_a_worker_that_fails_with_its_disk_says_so(ending, monkeypatch):
    worker, heard = ending
    worker.begin(NOTHING)
    worker.restored(PATIENCE_S)
    assert heard.get(timeout=PATIENCE_S) == WorkerAway(worker=0)
    monkeypatch.setattr(places, "COMMAND", (sys.executable, "-c", FAILS))
    worker.begin(NOTHING)
    failure = heard.get(timeout=PATIENCE_S)
    assert "its disk is read-only" in str(failure)


def test_a_process_that_cannot_be_started_again_is_given_up(ending, monkeypatch):
    worker, heard = ending
    worker.begin(NOTHING)
    worker.restored(PATIENCE_S)
    assert heard.get(timeout=PATIENCE_S) == WorkerAway(worker=0)
    monkeypatch.setattr(places, "COMMAND", ("/no/such/python",))
    worker.begin(NOTHING)
    failure = heard.get(timeout=PATIENCE_S)
    assert "failed 2 times in a row, placement.restarts = 1: it cannot be" in str(
        failure
    )
    assert "/no/such/python" in str(failure)


def test_one_that_cannot_be_started_at_first_says_so_at_once(begun, monkeypatch):
    monkeypatch.setattr(places, "COMMAND", ("/no/such/python",))
    worker, _ = begun()
    worker.begin(NOTHING)
    with pytest.raises(ConfigError, match=r"cannot be started: .*/no/such/python"):
        worker.restored(PATIENCE_S)


def test_a_worker_elsewhere_says_what_its_disk_has(breaking):
    worker, heard = breaking(
        itertools.repeat("p"), last_word="its disk is read-only", number=errno.EROFS
    )
    while not isinstance(failure := heard.get(timeout=PATIENCE_S), Exception):
        if isinstance(failure, WorkerAway):
            worker.begin(NOTHING)
    assert "its disk is read-only" in str(failure)


def test_one_that_does_not_come_up_with_its_disk_says_so(begun, monkeypatch):
    monkeypatch.setattr(places, "COMMAND", (sys.executable, "-c", FAILS))
    worker, _ = begun()
    worker.begin(NOTHING)
    with pytest.raises(ConfigError, match="its disk is read-only"):
        worker.restored(PATIENCE_S)


def test_islands_dial_a_worker_where_the_coordinator_s_ports_are_forwarded(ending):
    worker, _ = ending
    worker.begin(NOTHING)
    worker.restored(PATIENCE_S)
    assert worker.address == "coordinator.example:9079"


def test_a_line_to_another_machine_that_breaks_is_no_crash(breaking):
    worker, heard = breaking(itertools.repeat("the same"))
    for _ in range(9):
        assert heard.get(timeout=PATIENCE_S) == WorkerAway(worker=0)
        worker.begin(NOTHING)
        assert heard.get(timeout=PATIENCE_S) == WorkerBack(worker=0)


@pytest.mark.parametrize(
    "processes",
    [
        map(str, itertools.count()),
        itertools.chain(["one"], itertools.repeat("")),
    ],
    ids=["each line has another one", "none speaks any more"],
)
def test_processes_on_another_machine_that_end_are_counted(breaking, processes):
    worker, heard = breaking(processes)
    failure = None
    for _ in range(9):
        if isinstance(failure := heard.get(timeout=PATIENCE_S), Exception):
            break
        if isinstance(failure, WorkerAway):
            worker.begin(NOTHING)
    why = "worker 0 failed 2 times in a row, placement.restarts = 1: the line to it"
    assert why in str(failure)


@pytest.mark.parametrize("speaks", ["the same", ""])
def test_lines_that_break_before_a_worker_serves_are_made_again(breaking, speaks):
    processes = itertools.chain(
        itertools.repeat(speaks, 4), itertools.repeat("the same")
    )
    serves = itertools.chain(itertools.repeat(False, 4), itertools.repeat(True))
    _, heard = breaking(processes, serves=serves)
    assert heard.get(timeout=PATIENCE_S) == WorkerAway(worker=0)
    assert OtherMachine.lines == 5


@pytest.mark.parametrize(
    ("processes", "last_word", "lines"),
    [
        (itertools.repeat("one"), "its process there ended", 2),
        (itertools.repeat(""), "its process there ended", 2),
        (map(str, itertools.count()), "", 3),
    ],
    ids=["it has spoken", "it has not", "the network broke as well"],
)
def test_a_process_that_ends_twice_before_it_serves_is_given_up(
    breaking, processes, last_word, lines
):
    why = f"worker 0 did not come up: {last_word or 'the line to it broke'}"
    with pytest.raises(ConfigError, match=why):
        breaking(processes, serves=itertools.repeat(False), last_word=last_word)
    assert OtherMachine.lines == lines


def test_lines_that_break_for_the_outage_budget_are_made_no_more(breaking):
    why = r"it broke.*, again and again for 0\.2 s \(placement\.outage_budget_s\)"
    processes, serves = itertools.repeat("one"), itertools.repeat(False)
    with pytest.raises(ConfigError, match=why):
        breaking(processes, serves=serves, patience_s=0.2)
    assert OtherMachine.lines > 1


def test_a_worker_that_was_away_hears_which_incarnations_are_fenced(
    ending, monkeypatch
):
    worker, heard = ending
    worker.begin(NOTHING)
    worker.restored(PATIENCE_S)
    assert heard.get(timeout=PATIENCE_S) == WorkerAway(worker=0)
    for island, before in (("a", 2), ("b", 2), ("a", 3)):
        worker.send(Forget(island=island, before=before, kept=()))
    monkeypatch.setattr(
        places, "COMMAND", (sys.executable, "-c", TELLS_WHAT_IT_FORGETS)
    )
    worker.begin(NOTHING)
    assert heard.get(timeout=PATIENCE_S) == WorkerBack(worker=0)
    # Of each island the last one, which says it all: an absence may be long.
    told = [heard.get(timeout=PATIENCE_S) for _ in range(2)]
    assert told == [
        HolderTroubled(text=f"{i} before {n}") for i, n in (("a", 3), ("b", 2))
    ]
    worker.send(Forget(island="a", before=4, kept=()))
    assert heard.get(timeout=PATIENCE_S) == HolderTroubled(text="a before 4")
