"""A worker as the lead has it: it comes up, is missing, refuses, fails, or hangs up.
The line between the two.

A thread stands in for it.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from coordinator_support import begun
from tiny import MODEL, SEQUENCE_LENGTH

from diloco_jax.config import Config, ConfigError, IslandConfig, Placement, RunConfig
from diloco_jax.config.resolving import resolve_open
from diloco_jax.coordinator import workers
from diloco_jax.coordinator.worker import sign_of_life
from diloco_jax.coordinator.workers import LedWorker, WorkersHolder
from diloco_jax.models.build import build, build_plan
from diloco_jax.protocol.holding import (
    AllSaved,
    BeginWorker,
    DeltaArrived,
    FragmentsRestored,
    HolderTroubled,
    LeadAlive,
    RestoreFragments,
    RunOver,
    SaveAll,
    WorkerEnds,
    WorkerFailed,
    WorkerRefused,
    WorkerServes,
    from_worker,
    to_worker,
)
from diloco_jax.protocol.messages import Version
from diloco_jax.wire.duplex import WorkerLine, read_frame, write_frame
from diloco_jax.wire.errors import ConnectionLost, Refused

PATIENCE_S = 60.0
NOTHING = RestoreFragments(fragments=())
RESTORED = FragmentsRestored(fragments=(), discarded=0, environment={})
Speak = Callable[[socket.socket], None]


class Led:
    """A worker, and what the lead hears of it."""

    def __init__(self, **placement: object) -> None:
        addresses = ("host:7070", "127.0.0.1:9")
        config = Config(
            islands={"a": IslandConfig()},
            placement=Placement(workers=2, worker_addresses=addresses, **placement),
        )
        self.said: queue.SimpleQueue[object] = queue.SimpleQueue()
        begin = begun(config, fragments=(0,))
        self.worker = LedWorker(begin, config, self.said.put, self.said.put)

    def heard(self, kind: type) -> object:
        found = self.said.get(timeout=PATIENCE_S)
        assert isinstance(found, kind), found
        return found


@pytest.fixture
def dialled(monkeypatch) -> Iterator[Callable[..., Led]]:
    """Gives a worker that is dialled; each function speaks on one of its lines."""
    made: list[Led] = []

    def make(*speaks: Speak, first=NOTHING, **placement) -> Led:
        left = list(speaks)

        def dial(address: str, *_: object) -> socket.socket:
            if not left:
                raise ConnectionLost(f"{address}: no connection")
            own, other = socket.socketpair()
            speak = left.pop(0)

            def run() -> None:
                with other:
                    assert isinstance(to_worker(read_frame(other)), BeginWorker)
                    write_frame(other, sign_of_life(("low on disk",)))
                    speak(other)

            threading.Thread(target=run, daemon=True).start()
            return own

        monkeypatch.setattr(workers, "dial_worker", dial)
        made.append(Led(**placement))
        made[-1].worker.start(first)
        return made[-1]

    yield make
    for one in made:
        one.worker.end()


def serves(end: socket.socket) -> None:
    read_frame(end)
    write_frame(end, RESTORED)
    write_frame(end, WorkerServes())


def until(kind: type, end: socket.socket) -> None:
    """Read until the lead says this."""
    while not isinstance(to_worker(read_frame(end)), kind):
        pass


def breaks(end: socket.socket) -> None:
    read_frame(end)


@pytest.mark.parametrize(("every_s", "lines"), [(0.0, 2), (30.0, 1)])
def test_one_that_is_missing_is_dialled_and_told_now_and_then(
    dialled, caplog, monkeypatch, every_s, lines
):
    monkeypatch.setattr(workers, "TOLD_EVERY_S", every_s)

    def fails(end: socket.socket) -> None:
        read_frame(end)
        write_frame(end, WorkerFailed(text="no memory"))

    one = dialled(breaks, fails, serves)
    assert one.worker.restored() == RESTORED
    assert "worker 0 at host:7070 is missing: the line to it broke" in caplog.text
    assert caplog.text.count("is missing") == lines
    assert ("no memory" in caplog.text) == (lines == 2)
    shown = one.worker.shown()
    assert (shown["address"], shown["fragments"]) == ("host:7071", 1)
    assert shown["pid"] > 0
    assert one.worker.alive.alerts == ("low on disk",)


def test_one_that_does_not_come_in_time_fails_the_start(dialled):
    one = dialled(outage_budget_s=0.3)
    with pytest.raises(ConnectionLost, match="at host:7070 did not come up: host:7070"):
        one.worker.restored()


def test_an_unforeseen_error_of_its_thread_fails_the_start(dialled, monkeypatch):
    heard = threading.Event()

    def hears(end: socket.socket) -> None:
        read_frame(end)
        heard.set()

    def none(*_: object) -> None:
        assert heard.wait(PATIENCE_S)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(LedWorker, "_listen", none)
    one = dialled(hears)
    with pytest.raises(ConnectionLost, match="did not come up: can't start new thread"):
        one.worker.restored(first=True)


@pytest.mark.parametrize(
    ("code", "error", "why"),
    [
        ("lead", Refused, "worker 0 at host:7070: a later one"),
        ("config", ConfigError, "worker 0 at host:7070 did not come up: a later one"),
    ],
)
def test_one_that_refuses_is_not_dialled_again(dialled, code, error, why):
    one = dialled(
        lambda end: write_frame(end, WorkerRefused(code=code, text="a later one"))
    )
    with pytest.raises(error, match=why):
        one.worker.restored()


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (lambda end: write_frame(end, WorkerFailed(text="no memory")), "no memory"),
        (lambda end: end.sendall(b"\x01\0\0\0x"), "what it says cannot be read"),
    ],
)
def test_once_it_serves_its_last_word_ends_the_lead(dialled, last, why):
    def speak(end: socket.socket) -> None:
        serves(end)
        write_frame(end, HolderTroubled(text="a full disk"))
        last(end)

    one = dialled(speak)
    one.worker.restored()
    assert one.heard(HolderTroubled).text == "a full disk"
    gone = str(one.heard(ConnectionLost))
    assert "worker 0 at host:7070, which serves at host:7071, is gone: " in gone
    assert why in gone
    assert "start it again" in gone


def test_at_the_end_it_saves_and_hears_that_the_run_is_over(dialled):
    def speak(end: socket.socket) -> None:
        serves(end)
        until(SaveAll, end)
        write_frame(end, AllSaved(versions={}, digests={}))
        until(RunOver, end)
        write_frame(end, WorkerEnds())

    one = dialled(speak)
    one.worker.restored()
    one.worker.send(SaveAll(within_s=None))
    assert one.worker.saved(None) == AllSaved(versions={}, digests={})
    assert one.worker.tell_over()
    assert one.said.empty()


def test_one_that_did_not_hear_it_is_dialled_to_be_told(dialled):
    def ends(end: socket.socket) -> None:
        until(RunOver, end)
        write_frame(end, WorkerEnds())

    assert dialled(ends, first=RunOver()).worker.tell_over()
    silent = dialled(outage_budget_s=0.2, time_budget_s=1.0, first=RunOver())
    assert not silent.worker.tell_over()


def test_a_line_that_broke_ends_also_the_lead_that_begins_after_it(tmp_path):
    """As after a search for anchors, which was told and has ended since."""
    run = RunConfig(model=MODEL, sequence_length=SEQUENCE_LENGTH)
    placement = Placement(workers=2, worker_addresses=("host:7070", "host:7072"))
    islands = {"a": IslandConfig()}
    config = resolve_open(Config(run=run, islands=islands, placement=placement))
    plan = build_plan(run, build(run))
    holder = WorkersHolder(config, tmp_path, "r", plan, cast(Any, None), 1)
    broke, told = ConnectionLost("it is gone"), []
    holder.answer(lambda message: None, lambda error: told.append(("search", error)))
    holder._fail(broke)
    holder._fail(ConnectionLost("and another one"))
    holder.answer(lambda message: None, lambda error: told.append(("lead", error)))
    assert told[0] == ("search", broke)
    assert told[-1] == ("lead", broke)


@pytest.mark.parametrize("text", ["", "a snapshot has not ended within 60 s"])
def test_the_end_waits_for_what_a_worker_has_not_written_to_a_bucket(tmp_path, text):
    """Nothing is fetched from it, so it has to have written all."""
    placement = Placement(checkpoints="gs://bucket/folder")
    holder = SimpleNamespace(
        _config=SimpleNamespace(placement=placement), _workdir=tmp_path
    )
    worker = SimpleNamespace(name="worker 0", fragments=(0,))
    saved = AllSaved(versions={0: Version(1, 3)}, digests={0: "d"}, text=text)
    assert WorkersHolder._fetch_last(holder, worker, saved) is not bool(text)


MANY = 4000
"""More signs of life than a socket holds."""


@pytest.fixture
def lines():
    ends = socket.socketpair()
    lead = WorkerLine(ends[0], from_worker, LeadAlive, 3600.0, PATIENCE_S)
    worker = WorkerLine(ends[1], to_worker, LeadAlive, 3600.0, PATIENCE_S)
    yield lead, worker
    worker.close()
    lead.close()


def test_a_worker_that_is_busy_takes_the_leads_signs_of_life(lines):
    lead, worker = lines
    for _ in range(MANY):
        lead.send(LeadAlive())
    worker.send(WorkerServes())
    # It begins to look at what was said only now, and the line has not broken.
    assert next(lead.messages()) == WorkerServes()
    heard = worker.messages()
    assert [next(heard) for _ in range(MANY)] == [LeadAlive()] * MANY


def test_what_was_said_before_the_line_broke_is_heard(lines):
    lead, worker = lines
    lead.send(LeadAlive())
    heard = worker.messages()
    assert next(heard) == LeadAlive()
    lead.send(LeadAlive())
    lead.close()
    assert list(heard) == [LeadAlive()]


def test_a_message_that_cannot_be_sent_breaks_the_line_and_is_logged(lines, caplog):
    """Else a thread would die, and its process be silent."""
    lead, worker = lines
    worker.send(DeltaArrived(island="a", incarnation=1, fragment=0, tick=1, used=2**70))
    assert list(lead.messages()) == []
    assert "DeltaArrived" in caplog.text
    assert "OverflowError" in caplog.text
