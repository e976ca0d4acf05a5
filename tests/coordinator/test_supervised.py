"""A worker's process that ends again and again; a script stands in for it."""

from __future__ import annotations

import queue
import sys
from typing import Any

import pytest

from diloco_jax.config import Config, Placement
from diloco_jax.coordinator.workers import places
from diloco_jax.coordinator.workers.supervised import Supervised
from diloco_jax.protocol.coordinator.events import WorkerAway, WorkerBack
from diloco_jax.protocol.holding import RestoreFragments
from diloco_jax.protocol.working import BeginWorker

PATIENCE_S = 60.0
SERVES_AND_ENDS = """
import socket, sys
from diloco_jax.coordinator.workers.line import read_frame, write_frame
from diloco_jax.protocol.holding import FragmentsRestored
from diloco_jax.protocol.working import WorkerServes

end = socket.socket(fileno=int(sys.argv[1]))
read_frame(end), read_frame(end)
restored = FragmentsRestored(fragments=(), discarded=0, environment={})
write_frame(end, restored)
write_frame(end, WorkerServes(address="127.0.0.1:7079"))
"""
NOTHING = RestoreFragments(fragments=())


@pytest.fixture
def ending(monkeypatch):
    """A worker that may be started again once; what it says, and its failure."""
    monkeypatch.setattr(places, "COMMAND", (sys.executable, "-c", SERVES_AND_ENDS))
    placement = Placement(
        bind="127.0.0.1:7077",
        advertise="coordinator.example:9077",
        restarts=1,
        restart_delay_s=0.0,
    )
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
    yield worker, heard
    worker.end()
    worker.join(PATIENCE_S)


def test_a_worker_that_ends_again_and_again_is_given_up(ending):
    worker, heard = ending
    worker.begin(NOTHING)
    worker.restored(PATIENCE_S)
    assert heard.get(timeout=PATIENCE_S) == WorkerAway(worker=0)
    worker.begin(NOTHING)
    assert heard.get(timeout=PATIENCE_S) == WorkerBack(worker=0)
    failure = heard.get(timeout=PATIENCE_S)
    assert "worker 0 failed 2 times in a row, placement.restarts = 1" in str(failure)


def test_islands_dial_a_worker_where_the_coordinator_s_ports_are_forwarded(ending):
    worker, _ = ending
    worker.begin(NOTHING)
    worker.restored(PATIENCE_S)
    assert worker.address == "coordinator.example:9079"
