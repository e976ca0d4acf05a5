"""How long an island waits for a coordinator that has not let it in yet."""

import numpy as np
import pytest
from link_support import DEADLINES, hello

from diloco_jax.deadlines import Deadlines
from diloco_jax.island.network import link as link_module
from diloco_jax.island.network.link import Link
from diloco_jax.wire.errors import (
    Busy,
    ConnectionLost,
    RemoteProtocolError,
    SecurityError,
)


class Clock:
    """Time that passes in waits alone; `seen` are the waits."""

    def __init__(self):
        self.now, self.seen = 0.0, []

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.seen.append(seconds)
        self.now += seconds


@pytest.fixture
def waiting(mailbox, monkeypatch):
    """A link to nobody, on a clock: `error` is what every attempt meets."""

    class Away:
        def open_control(self, hello):
            raise link.error

    link, clock = Link(Away(), hello, mailbox, DEADLINES), Clock()
    monkeypatch.setattr(link_module, "time", clock)
    monkeypatch.setattr(link, "_closing", clock)
    link.clock = clock
    return link


@pytest.mark.parametrize("error", [ConnectionLost("nobody"), Busy("it gathers")])
def test_a_coordinator_that_is_not_there_yet_is_waited_for_as_long_as_it_may_take(
    waiting, error, caplog
):
    waiting.error = error
    with pytest.raises(type(error)):
        waiting.connect(100.0, 1000.0)
    assert waiting.clock.now == pytest.approx(1000.0, abs=DEADLINES.retry_max_s)
    told = [r.getMessage() for r in caplog.records if "awaited" in r.name]
    assert told[0] == f"waits for the coordinator, for 0 s of at most 1000: {error}"
    since = [float(text.split()[5]) for text in told]
    least_s, most_s = DEADLINES.pin_s, DEADLINES.pin_s + DEADLINES.retry_max_s
    gaps = np.diff(since)
    assert len(told) > 2
    assert (gaps >= least_s - 1).all()
    assert (gaps <= most_s + 1).all()


def test_a_shorter_patience_with_who_is_away_counts_for_nothing(waiting):
    waiting.error = ConnectionLost("nobody")
    with pytest.raises(ConnectionLost):
        waiting.connect(100.0, 1.0)
    assert waiting.clock.now >= 100.0


def test_who_answers_and_is_no_coordinator_is_not_waited_for_as_long(waiting):
    waiting.error = RemoteProtocolError("of another version")
    with pytest.raises(RemoteProtocolError):
        waiting.connect(100.0, 1000.0)
    assert waiting.clock.now == pytest.approx(100.0, abs=DEADLINES.retry_max_s)


def test_one_that_cannot_be_trusted_fails_soon_whenever_it_comes(waiting):
    waiting.error = ConnectionLost("nobody")
    later = waiting.clock.wait

    def wait(seconds):
        later(seconds)
        if waiting.clock.now > 500.0:
            waiting.error = SecurityError("not ours")

    waiting.clock.wait = wait
    with pytest.raises(SecurityError):
        waiting.connect(100.0, 1000.0)
    assert waiting.clock.now <= 500.0 + 2 * DEADLINES.retry_max_s


@pytest.mark.parametrize("error", [ConnectionLost("nobody"), SecurityError("no TLS")])
def test_an_island_that_starts_first_comes_again_soon(mailbox, monkeypatch, error):
    """Whatever the time budget is; a coordinator that is just ending is left time."""

    class Away:
        def open_control(self, hello):
            raise error

    clock = Clock()
    link = Link(Away(), hello, mailbox, Deadlines(300.0))
    monkeypatch.setattr(link_module, "time", clock)
    monkeypatch.setattr(link, "_closing", clock)
    with pytest.raises(type(error)):
        link.connect(100.0)
    if isinstance(error, SecurityError):
        assert clock.seen == [30.0]
    else:
        assert clock.seen == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
