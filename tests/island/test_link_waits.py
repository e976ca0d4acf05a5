"""How long an island waits for a coordinator that has not let it in yet."""

from types import SimpleNamespace

import numpy as np
import pytest
from link_support import DEADLINES, hello

from diloco_jax.deadlines import Deadlines
from diloco_jax.errors import EXIT_REFUSED
from diloco_jax.island.network import link as link_module
from diloco_jax.island.network.link import Link
from diloco_jax.protocol.messages import Welcome
from diloco_jax.wire.errors import (
    REVOKED_CODE,
    Busy,
    ConnectionLost,
    Refused,
    RemoteProtocolError,
    SecurityError,
)


class Clock:
    """Time that passes in waits alone; `seen` are the waits."""

    def __init__(self):
        self.now, self.seen, self.ended = 0.0, [], False

    def monotonic(self):
        return self.now

    def wait(self, seconds):
        self.seen.append(seconds)
        self.now += seconds
        return self.ended

    def set(self):
        self.ended = True


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


REVOKED = Refused(REVOKED_CODE, "the certificate of island a is revoked")


@pytest.mark.parametrize("first", [REVOKED, ConnectionLost("its stream ended")])
def test_an_island_whose_key_was_revoked_waits_for_another_and_then_ends(
    waiting, mailbox, first
):
    """It costs money while nobody takes what it computes."""
    waiting.error = REVOKED
    waiting._reconnect(first)
    ending = mailbox.ending
    assert (ending.exit_code, ending.reason) == (EXIT_REFUSED, "refused")
    assert "is revoked (revoked)" in ending.text
    most_s = 2 * DEADLINES.retry_max_s
    assert waiting.clock.now == pytest.approx(DEADLINES.another_key_s, abs=most_s)


def test_an_island_with_another_key_goes_on(waiting, mailbox, monkeypatch):
    waiting.error = REVOKED
    met = iter([REVOKED, ConnectionLost("it starts again"), None])

    def connected(hello):
        if error := next(met):
            if error is not REVOKED:  # The key comes at the last moment.
                waiting.clock.now += DEADLINES.another_key_s
            raise error
        return SimpleNamespace(
            welcome=Welcome(run_id="r", term=1, resumed=False, versions=())
        )

    monkeypatch.setattr(waiting._client, "open_control", connected, raising=False)
    waiting._reconnect(REVOKED)
    assert mailbox.ending is None


def test_a_revoked_key_ends_the_first_attempt(waiting):
    waiting.error = REVOKED
    with pytest.raises(Refused, match="is revoked"):
        waiting.connect(100.0, 1000.0)
    assert waiting.clock.now == 0.0


def test_one_that_was_revoked_and_removed_ends_at_once(waiting, mailbox):
    waiting.error = Refused("removed", "an operator removed island 'a'")
    waiting._reconnect(REVOKED)
    assert mailbox.ending.exit_code == EXIT_REFUSED
    assert waiting.clock.now <= DEADLINES.retry_min_s
