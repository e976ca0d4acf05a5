"""An island and a coordinator that is not there, is lost, or lost its state."""

import queue
import threading
from types import SimpleNamespace

import coordinator_says as says
import numpy as np
import pytest
from link_support import (
    DEADLINES,
    SIZES,
    WAIT_S,
    Coordinator,
    encoded,
    hello,
    serve,
    wait_for_news,
)

from diloco_jax.config.placement import Deadlines
from diloco_jax.errors import EXIT_REFUSED
from diloco_jax.island import link as link_module
from diloco_jax.island.link import Link
from diloco_jax.island.transfers import Lanes
from diloco_jax.protocol import messages
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.island.conversation import Wanted
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import Record, Version, Welcome
from diloco_jax.wire.errors import (
    REVOKED_CODE,
    Busy,
    ConnectionLost,
    Refused,
    RemoteProtocolError,
    SecurityError,
)


def test_a_coordinator_that_lost_its_state_begins_a_new_term(
    stack, coordinator, link, mailbox, wanted
):
    assert mailbox.status().term == 1
    assert mailbox.decide().term == 0
    says.take(mailbox, 0, 3)
    coordinator.welcome_versions, coordinator.term = (), 0
    coordinator.server.stop(0.1)
    server, _ = serve(stack, coordinator, bind=coordinator.address)
    coordinator.hellos.get(timeout=WAIT_S)
    coordinator.hellos.get(timeout=WAIT_S)
    coordinator.session.send(messages.AnchorRequest(fragment=1))
    seen = [wait_for_news(mailbox)]
    while not seen[-1].anchors and len(seen) < 3:
        seen.append(wait_for_news(mailbox))  # The take that was asked for is news, too.
    assert seen[-1].anchors == (messages.AnchorRequest(fragment=1),)
    assert {decision.term for decision in seen} == {0}
    assert mailbox.status().term == 1
    successor = Coordinator()
    successor.welcome_versions, successor.term = (Version(2, 4),), 2
    server.hand_over(successor)
    successor.hellos.get(timeout=WAIT_S)
    assert wanted.get(timeout=WAIT_S) == Wanted(0, Version(2, 4))
    assert mailbox.decide().term == 2
    status = mailbox.status()
    assert (status.term, status.run_id) == (2, "r")


def test_an_anchor_is_sent_ahead_and_once(coordinator, sender):
    coordinator.upload_errors = [Busy("later")]
    sender.put(0, 4, encoded(1.0))
    assert coordinator.failed.get(timeout=WAIT_S).tick == 4
    sender.put_anchor(0, Version(1, 7), encoded(2.0)[:1])
    uploads = [coordinator.uploads.get(timeout=WAIT_S) for _ in range(2)]
    by_version = {start.version: payload for start, payload in uploads}
    assert by_version == {
        None: np.ones(38, np.float32).tobytes(),
        Version(1, 7): np.full(32, 2.0, np.float32).tobytes(),
    }
    coordinator.upload_errors = [Refused("gathering", "not asked for")]
    sender.put_anchor(0, Version(1, 8), encoded(3.0)[:1])
    assert coordinator.failed.get(timeout=WAIT_S).version == Version(1, 8)
    sender.resend(messages.ResendRequest(fragment=0, tick=4))
    assert coordinator.uploads.get(timeout=WAIT_S)[0].tick == 4


def test_a_delta_that_nobody_takes_holds_up_no_anchor_and_no_other_delta(
    sender, monkeypatch
):
    """A worker has lost fragment 0; the anchor for it comes by the same thread."""
    sent, tries = queue.SimpleQueue(), queue.SimpleQueue()

    def upload(start, payload):
        if (start.fragment, start.version) == (0, None):
            tries.put(start)
            raise Busy("fragment 0 was lost here")
        sent.put((start.fragment, start.version))
        return len(payload)

    worker = SimpleNamespace(upload=upload)
    monkeypatch.setattr(sender._lanes, "of", lambda fragment: worker)
    sender.put(0, 4, encoded(1.0))
    for _ in range(2):
        assert tries.get(timeout=WAIT_S).tick == 4
    sender.put(1, 5, encoded(2.0))
    assert sent.get(timeout=WAIT_S) == (1, None)
    sender.put_anchor(0, Version(1, 7), encoded(2.0)[:1])
    assert sent.get(timeout=WAIT_S) == (0, Version(1, 7))
    assert tries.get(timeout=WAIT_S).tick == 4
    sender.forget(0, 4)


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
    told = [r.getMessage() for r in caplog.records if "waits for" in r.getMessage()]
    assert told[0] == f"waits for the coordinator, for 0 s of at most 1000: {error}"
    since = [float(text.split()[5]) for text in told]
    least_s, most_s = DEADLINES.pin_s, DEADLINES.pin_s + DEADLINES.retry_max_s
    gaps = np.diff(since)
    assert len(told) > 2
    assert (gaps >= least_s - 1).all()
    assert (gaps <= most_s + 1).all()


REVOKED = Refused(REVOKED_CODE, "the certificate of island a is revoked")


@pytest.mark.parametrize(
    ("error", "away_s", "waits_s"),
    [
        (ConnectionLost("nobody"), 1.0, 100.0),  # A shorter one counts for nothing.
        (RemoteProtocolError("of another version"), 1000.0, 100.0),
        (REVOKED, 1000.0, 0.0),
    ],
)
def test_who_is_not_away_is_not_waited_for_as_long(waiting, error, away_s, waits_s):
    waiting.error = error
    with pytest.raises(type(error)):
        waiting.connect(100.0, away_s)
    assert waiting.clock.now == pytest.approx(waits_s, abs=DEADLINES.retry_max_s)


@pytest.mark.parametrize(
    ("error", "pauses"),
    [
        (ConnectionLost("nobody"), [0.5, 1, 2, 4, 8, 16, 30, 30, 30]),
        (SecurityError("no TLS"), [30.0]),
    ],
)
def test_an_island_that_starts_first_comes_again_soon(waiting, error, pauses):
    """Whatever the time budget is; a coordinator that is just ending is left time."""
    waiting.error, waiting._deadlines = error, Deadlines(300.0)
    with pytest.raises(type(error)):
        waiting.connect(100.0)
    assert waiting.clock.seen == pauses


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

    monkeypatch.setattr(waiting._lanes, "open_control", connected, raising=False)
    waiting._reconnect(REVOKED)
    assert mailbox.ending is None


def test_one_that_was_revoked_and_removed_ends_at_once(waiting, mailbox):
    waiting.error = Refused("removed", "an operator removed island 'a'")
    waiting._reconnect(REVOKED)
    assert mailbox.ending.exit_code == EXIT_REFUSED
    assert waiting.clock.now <= DEADLINES.retry_min_s


class Streams:
    """A coordinator for a link: keeps the records that come, by stream."""

    def __init__(self):
        self.records, self.second = [], threading.Event()

    def open_control(self, hello):
        number, records = len(self.records), []
        self.records.append(records)

        def send(message):
            records.extend(record.seq for record in message.records)
            if number and records:
                self.second.set()

        welcome = messages.Welcome(run_id="r", term=1, resumed=False, versions=())
        return SimpleNamespace(welcome=welcome, send=send)


class Reconnects:
    """The lock of those who send; the second who takes it finds another stream."""

    def __init__(self, reconnect):
        self.taken, self._reconnect = 0, reconnect

    def __enter__(self):
        self.taken += 1
        if self.taken == 2:
            self._reconnect()

    def __exit__(self, *error):
        pass


def test_what_went_on_a_lost_stream_is_said_again_on_the_next(mailbox):
    def record(number):
        said = Record(seq=number, kind="adopted", step=number)
        mailbox.post(Status(phase="training", steps=number), (said,))

    def reconnect():
        record(2)
        link._open()

    streams = Streams()
    link = Link(streams, hello, mailbox, DEADLINES)
    link.connect(WAIT_S)
    link._sending = Reconnects(reconnect)
    record(1)
    reporting = threading.Thread(target=link._report, daemon=True)
    reporting.start()
    assert streams.second.wait(WAIT_S)
    link._closing.set()
    reporting.join(WAIT_S)
    assert streams.records == [[1], [1, 2]]


def test_a_failed_donor_is_told_of_until_a_stream_has_it(mailbox):
    said, streams = [], iter([ConnectionLost("it reads too slowly"), None])

    def open_control(hello):
        def send(message):
            if error and not isinstance(message, messages.Report):
                raise error
            said.append(message)

        error = next(streams)
        welcome = messages.Welcome(run_id="r", term=1, resumed=False, versions=())
        return SimpleNamespace(welcome=welcome, send=send)

    link = Link(SimpleNamespace(open_control=open_control), hello, mailbox, DEADLINES)
    rested = []
    mailbox.errands = {messages.DonorFailed: rested.append}
    mailbox.donors_failed(["b", "c"])
    link.connect(WAIT_S)
    with pytest.raises(ConnectionLost):
        link._send_reports(link._connection)
    link.connect(WAIT_S)
    for _ in range(2):
        link._send_reports(link._connection)
    told = [m for m in said if isinstance(m, messages.DonorFailed)]
    assert [failed.island for failed in told] == ["b", "c"]
    assert rested == ["b", "c"], "once, however late it is told"


def test_an_anchor_goes_to_its_worker_of_which_the_welcome_did_not_know(
    coordinator, client, mailbox, stack
):
    """Workers may be there only once most islands have offered theirs."""
    lanes = Lanes(client, SIZES)
    link = Link(lanes, hello, mailbox, DEADLINES)
    link.connect(WAIT_S)
    link.start()
    stack.callback(link.leave, Ending(0, "end of test", "stopped"), 5.0)
    coordinator.hellos.get(timeout=WAIT_S)
    assert lanes.addresses == ()
    at = ("127.0.0.1:7301", "127.0.0.1:7302")
    coordinator.session.send(messages.AnchorRequest(fragment=1, workers=at))
    assert wait_for_news(mailbox).anchors[0].fragment == 1
    assert lanes.addresses == at
    assert lanes.of(1) is not client.transfers
