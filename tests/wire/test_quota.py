"""Control messages of one peer that come too fast wait."""

from __future__ import annotations

import functools
import time
from types import SimpleNamespace

import pytest
from wire_support import WAIT_S, Clock, hello, report

from diloco_jax.wire import limits, server, session
from diloco_jax.wire.errors import Busy


def test_a_peer_may_send_a_burst_then_waits(monkeypatch, caplog):
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    paced = limits.Quota("island a")
    half = limits.BURST_BYTES // 2
    assert [paced.wait_s(half), paced.wait_s(half)] == [0.0, 0.0]
    waits = [paced.wait_s(limits.BYTES_PER_SECOND) for _ in range(3)]
    assert waits == pytest.approx([1.0, 2.0, 3.0])
    (told,) = caplog.messages
    assert "island a sends more than 65536 bytes of control messages a second" in told
    clock.now += 3.0
    assert paced.wait_s(0) == 0.0
    clock.now += 1e6
    assert paced.wait_s(limits.BURST_BYTES) == 0.0
    assert paced.wait_s(limits.BYTES_PER_SECOND) == pytest.approx(1.0), "no more saved"


def test_a_session_reads_no_faster(serve, connect, handlers, monkeypatch):
    waited = []
    # None is earned meanwhile.
    small = functools.partial(limits.Quota, rate=1, burst=limits.HELLO_BYTES)
    monkeypatch.setattr(server, "Quota", small)
    held = SimpleNamespace(sleep=waited.append, monotonic=time.monotonic)
    monkeypatch.setattr(session, "time", held)
    _, address = serve()
    control = connect(address).open_control(hello())
    assert waited == [], "a hello may come at once"
    control.send(report(1))
    deadline = time.monotonic() + WAIT_S
    while not waited and time.monotonic() < deadline:
        time.sleep(0.01)
    assert waited
    assert waited[0] > 0


def test_one_island_has_few_control_streams(serve, connect, tls):
    _, address = serve(tls=tls["coordinator"], max_islands=8)
    for number in range(server.SESSIONS_EACH):
        said = hello(session=f"s{number}")
        connect(address, tls=tls["island"]).open_control(said)
    with pytest.raises(Busy, match="4 control streams of island a are open, the limit"):
        connect(address, tls=tls["island"]).open_control(hello(session="more"))
