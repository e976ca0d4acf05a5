"""Messages that an outpost passes on between a lead and its worker."""

from __future__ import annotations

import contextlib
import itertools
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from diloco_jax.coordinator.workers.line import START_S, read_frame, write_frame
from diloco_jax.coordinator.workers.outpost import relay as relays
from diloco_jax.coordinator.workers.outpost.relay import relay
from diloco_jax.deadlines import Deadlines
from diloco_jax.protocol.holding import (
    EndWorker,
    LeadAlive,
    WorkerFailed,
    WorkerServes,
    encode,
)

PATIENCE_S = 60.0


def relayed(lead, outer, inner, deadlines) -> bool | None:
    """Relay; return whether the worker hung, None if it neither hung nor failed. The
    lead has not heard of it by then."""
    left = []

    def gone(hung: bool) -> None:
        left.append(hung)
        # The words of the process itself come before.
        heard = waiting(lead)
        assert encode(WorkerFailed(text=relays.ENDED)) not in heard
        assert encode(WorkerFailed(text=relays.HUNG)) not in heard

    relay(outer, inner, deadlines, gone)
    return left[0] if left else None


def waiting(end: socket.socket) -> bytes:
    """Peek at the bytes that wait, though another thread may read them meanwhile."""
    with end.dup() as own:
        own.settimeout(0.0)
        try:
            return own.recv(1 << 16, socket.MSG_PEEK)
        except BlockingIOError:
            return b""


@pytest.fixture
def relaying():
    """Begins to relay; gives the lead's end, the worker's, and how the worker left."""
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))

        def begin(budget_s: float = PATIENCE_S):
            pairs = [socket.socketpair() for _ in range(2)]
            for end in (end for pair in pairs for end in pair):
                end.settimeout(PATIENCE_S)
                stack.callback(end.close)
            (lead, outer), (worker, inner) = pairs
            found = pool.submit(relayed, lead, outer, inner, Deadlines(budget_s))
            stack.callback(lead.close)
            stack.callback(worker.close)
            return lead, worker, found

        yield begin


def test_messages_pass_as_they_are_and_the_last_word_arrives(relaying):
    lead, worker, found = relaying()
    write_frame(lead, LeadAlive())
    assert read_frame(worker) == encode(LeadAlive())
    serves, failed = WorkerServes(address="127.0.0.1:1"), WorkerFailed(text="why")
    for word in (serves, failed):
        write_frame(worker, word)
    worker.close()
    assert [read_frame(lead) for _ in range(4)] == [
        encode(serves),
        encode(failed),
        encode(WorkerFailed(text=relays.ENDED)),
        None,
    ]
    assert found.result(PATIENCE_S) is False, "it failed"


def test_a_worker_that_is_told_to_end_hears_it_though_the_lead_is_gone(relaying):
    lead, worker, found = relaying()
    write_frame(lead, EndWorker())
    lead.close()
    assert read_frame(worker) == encode(EndWorker())
    worker.close()
    assert found.result(PATIENCE_S) is None


def test_a_worker_that_leaves_a_silent_lead_is_not_ended(relaying):
    """It lives on, for the next lead."""
    lead, worker, found = relaying()
    write_frame(worker, WorkerServes(address="127.0.0.1:1"))
    worker.close()
    read_frame(lead)
    assert read_frame(lead) == encode(WorkerFailed(text=relays.ENDED))
    assert found.result(PATIENCE_S) is None


def test_a_lead_that_is_gone_is_noticed_by_the_worker(relaying):
    lead, worker, found = relaying()
    lead.close()
    assert read_frame(worker) is None
    assert found.result(PATIENCE_S) is None


def test_a_worker_that_says_nothing_hangs(relaying, monkeypatch):
    monkeypatch.setattr(relays, "START_S", 0.0)
    lead, _, found = relaying(0.1)
    assert found.result(PATIENCE_S) is True
    assert read_frame(lead) == encode(WorkerFailed(text=relays.HUNG))
    assert read_frame(lead) is None


class Impatient:
    """An end that times out at once, unless it may take as long as a start does."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        for name in ("recv", "sendall", "shutdown"):
            setattr(self, name, getattr(end, name))

    def settimeout(self, value: float) -> None:
        self._end.settimeout(PATIENCE_S if value == START_S else 0.0)


def test_a_lead_that_is_gone_makes_no_worker_hang(relaying, monkeypatch):
    """A process that starts, and is killed for a broken line, never serves."""
    clock = itertools.count(0.0, 1000.0)
    monkeypatch.setattr(relays.time, "monotonic", lambda: next(clock))
    lead, _, found = relaying()
    lead.close()
    assert found.result(PATIENCE_S) is None


def test_a_process_that_starts_may_be_silent_for_longer_than_one_that_runs():
    pairs = [socket.socketpair() for _ in range(2)]
    (lead, outer), (worker, inner) = pairs
    with lead, outer, worker, inner, ThreadPoolExecutor(1) as pool:
        lead.settimeout(PATIENCE_S)
        found = pool.submit(relayed, lead, outer, Impatient(inner), Deadlines(1.0))
        write_frame(lead, LeadAlive())
        assert read_frame(worker) == encode(LeadAlive()), "it is relayed by now"
        write_frame(worker, WorkerFailed(text="its first word"))
        assert read_frame(lead) == encode(WorkerFailed(text="its first word"))
        assert read_frame(lead) == encode(WorkerFailed(text=relays.ENDED)), "silent"
        found.result(PATIENCE_S)
