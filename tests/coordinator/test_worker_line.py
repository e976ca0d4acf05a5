"""The line between a lead and a worker that is busy for minutes."""

from __future__ import annotations

import socket

import pytest

from diloco_jax.protocol.holding import (
    DeltaArrived,
    LeadAlive,
    WorkerServes,
    from_worker,
    to_worker,
)
from diloco_jax.wire.duplex import WorkerLine

SILENCE_S = 60.0
MANY = 4000
"""More signs of life than a socket holds."""


@pytest.fixture
def lines():
    ends = socket.socketpair()
    lead = WorkerLine(ends[0], from_worker, LeadAlive, 3600.0, SILENCE_S)
    worker = WorkerLine(ends[1], to_worker, LeadAlive, 3600.0, SILENCE_S)
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
