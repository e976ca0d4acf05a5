"""A worker that restores for minutes, and whose lead is started again meanwhile."""

from __future__ import annotations

import dataclasses
import queue
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from diloco_jax import run_files
from diloco_jax.config import Config, IslandConfig, Placement
from diloco_jax.coordinator.workers import process, rendezvous
from diloco_jax.coordinator.workers.line import read_frame, write_frame
from diloco_jax.coordinator.workers.process import sign_of_life
from diloco_jax.protocol.holding import (
    BeginWorker,
    EndWorker,
    RestoreFragments,
    WorkerAlive,
    from_worker,
)

pytestmark = pytest.mark.skipif(
    not rendezvous.HAS_SURVIVORS, reason="workers end with their lead here"
)
PATIENCE_S = 20.0


class Restores:
    """In place of a `HoldingWorker`: it restores until the test lets it go on."""

    began: threading.Event
    goes_on: threading.Event
    leads: queue.SimpleQueue[int]

    def __init__(self, begin: BeginWorker, *_) -> None:
        self.closing = threading.Event()
        self.leads.put(begin.lead)

    def answer(self, line) -> None: ...

    def go_on(self, begin: BeginWorker, line) -> None:
        self.leads.put(begin.lead)

    def alive(self) -> WorkerAlive:
        return sign_of_life(("restores",))

    def obey(self, message) -> None:
        if isinstance(message, RestoreFragments):
            self.began.set()
            assert self.goes_on.wait(PATIENCE_S)

    def keep_house(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def restoring(tmp_path, monkeypatch):
    """A worker of lead 1 that restores; gives its first message, and its exit code."""
    (tmp_path / run_files.WORKERS).mkdir()
    Restores.began, Restores.goes_on = threading.Event(), threading.Event()
    Restores.leads = queue.SimpleQueue()
    monkeypatch.setattr(process, "HoldingWorker", Restores)
    monkeypatch.setattr(process, "setup_logging", lambda: None)
    monkeypatch.setattr(process.os, "_exit", sys.exit)
    placement = Placement(outage_budget_s=1.0)
    config = Config(islands={"a": IslandConfig()}, placement=placement)
    begin = BeginWorker(
        config=dataclasses.asdict(config),
        workdir=str(tmp_path),
        run_id="r",
        worker=0,
        fragments=(0,),
        bind="127.0.0.1:0",
        ticket_key=b"",
        lead=1,
    )
    own, other = socket.socketpair()
    with own, ThreadPoolExecutor(1) as pool:
        code = pool.submit(process.main, other.detach())
        write_frame(own, begin)
        write_frame(own, RestoreFragments(fragments=()))
        assert Restores.began.wait(PATIENCE_S)
        yield begin, code
        Restores.goes_on.set()


def test_a_new_lead_hears_a_worker_that_still_restores_for_the_one_before(
    restoring, tmp_path
):
    begin, code = restoring
    reached = rendezvous.reach(tmp_path, 0)
    with reached.end as line:
        write_frame(line, replace(begin, lead=2))
        line.settimeout(PATIENCE_S)
        frame = read_frame(line)
        assert frame is not None, "it is silent, and would be killed"
        assert from_worker(frame).alerts == ("restores",)
        write_frame(line, EndWorker())
        Restores.goes_on.set()
        assert code.result(PATIENCE_S) == 0
    assert [Restores.leads.get(timeout=0) for _ in range(2)] == [1, 2]
