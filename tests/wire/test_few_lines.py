"""Peers' errors fill no log: a few lines for each, and how many are left out."""

from __future__ import annotations

import logging

import pytest
from wire_support import WAIT_S, Clock, fetch_request, hello

from diloco_jax.protocol.messages import Steer
from diloco_jax.protocol.values import Version
from diloco_jax.wire import limits
from diloco_jax.wire.errors import Refused, VersionGone
from diloco_jax.wire.limits import (
    AT_ONCE,
    EVERY_S,
    MOST_CHARS,
    MOST_KNOWN,
    RateLimitedLog,
)
from diloco_jax.wire.principal import island

logger = logging.getLogger("diloco_jax.wire.test")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO)
    clock = Clock()
    monkeypatch.setattr(limits, "time", clock)
    return clock


def say(
    lines: RateLimitedLog, name: str, text: str = "refused", times: int = 1
) -> None:
    for _ in range(times):
        lines.log(logger, logging.INFO, island(name), text)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Lines of this logger: threads of other tests may still end, and say so."""
    return [r.getMessage() for r in caplog.records if r.name == logger.name]


def test_a_peer_has_some_lines_then_one_a_minute_which_counts_the_others(clock, caplog):
    lines = RateLimitedLog()
    say(lines, "a", times=5000)
    assert told(caplog) == ["refused"] * AT_ONCE
    clock.now += EVERY_S
    say(lines, "a", times=3)
    assert told(caplog)[AT_ONCE:] == [
        f"refused; {5000 - AT_ONCE} more lines about island a were left out"
    ]
    caplog.clear()
    clock.now += EVERY_S
    say(lines, "a")
    assert "; 2 more lines" in caplog.text, "counted anew"
    say(lines, "b")
    assert told(caplog)[1:] == ["refused"], "another peer has its own"


def test_what_is_kept_and_written_is_bounded(clock, caplog):
    lines = RateLimitedLog()
    for number in range(MOST_KNOWN + 50):
        say(lines, f"i{number}")
    assert len(lines._known) == MOST_KNOWN
    caplog.clear()
    say(lines, "a", "x" * 10 * MOST_CHARS)
    assert len(told(caplog)[0]) == MOST_CHARS


def test_a_level_that_is_not_logged_costs_no_line(clock, caplog):
    lines = RateLimitedLog()
    for _ in range(2 * AT_ONCE):
        lines.log(logger, logging.DEBUG, None, "busy")
    lines.log(logger, logging.INFO, None, "refused")
    assert told(caplog) == ["refused"]


def test_an_error_at_hand_brings_its_trace(clock, caplog):
    lines = RateLimitedLog()
    for _ in range(3 * AT_ONCE):
        try:
            raise OSError("disk")
        except OSError:
            lines.log(logger, logging.ERROR, None, "failed", trace=True)
    assert caplog.text.count("OSError: disk") == AT_ONCE


def test_calls_streams_and_transfers_share_the_lines_of_their_peer(
    serve, connect, handlers, tls, clock, caplog, monkeypatch
):
    _, address = serve(tls=tls["coordinator"])

    def refuse(hello, session):
        raise Refused("no", "not today")

    monkeypatch.setattr(handlers, "connect", refuse)
    client = connect(address, tls=tls["island"])
    for number in range(AT_ONCE):
        with pytest.raises(Refused, match="this is for the operator"):
            client.steer(Steer(how="admit", island=f"i{number}"), WAIT_S)
        with pytest.raises(Refused, match="not today"):
            client.open_control(hello(session=f"s{number}"))
        with pytest.raises(VersionGone):
            client.transfers.fetch(fetch_request(want=Version(1, 9)), max_bytes=8)
    whose = {"server", "session", "bulk_server"}
    about = [r for r in caplog.records if r.name.rpartition(".")[2] in whose]
    assert len(about) == AT_ONCE
    assert {r.name.rpartition(".")[2] for r in about} == whose
    clock.now += EVERY_S
    with pytest.raises(Refused):
        client.steer(Steer(how="admit", island="more"), WAIT_S)
    assert f"; {2 * AT_ONCE} more lines about island a were left out" in caplog.text
