"""Link, sender, receiver and lanes to workers, over real gRPC on loopback."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
import weakref

import coordinator_says as says
import numpy as np
import pytest
from link_support import (
    DEADLINES,
    IDENTITY,
    PIECES,
    SIZES,
    WAIT_S,
    encoded,
    hello,
    serve,
    wait_for_news,
)

from diloco_jax.config.placement import Deadlines
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.island.link import Link
from diloco_jax.island.mailbox import Arrival
from diloco_jax.island.transfers import TOLD_FROM, Fetcher, Lanes, Receiver
from diloco_jax.protocol import messages
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.island.conversation import Wanted
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import Outstanding, Record, Span, Version
from diloco_jax.wire.bulk import FetchRequest, FetchSource
from diloco_jax.wire.client import Client
from diloco_jax.wire.errors import (
    Busy,
    ConnectionLost,
    Refused,
    RemoteProtocolError,
    VersionGone,
)


class FakeExchange:
    """Hands payloads on as bytes."""

    layouts_down = (PayloadLayout.of(get_codec("int8"), PIECES),)

    def part_down(self, fragment):
        return ()

    def anchor_bytes(self, fragment):
        return 4 * 38

    def put_publish(self, fragment, payload):
        return (bytes(payload),)

    def put_anchor(self, fragment, payload):
        return (bytes(payload),)


def test_messages_reach_the_mailbox(coordinator, link, mailbox, wanted):
    send = coordinator.session.send
    send(messages.TakeRequest(fragment=2, tick=5))
    assert wait_for_news(mailbox).takes == (messages.TakeRequest(fragment=2, tick=5),)
    resend = messages.ResendRequest(fragment=2, tick=5)
    send(resend)
    assert link.resent.get(timeout=WAIT_S) == resend
    send(messages.Published(fragment=2, version=Version(1, 9)))
    assert wanted.get(timeout=WAIT_S) == Wanted(2, Version(1, 9))


def test_an_island_that_is_to_end_reports_no_more_than_before(
    coordinator, link, mailbox
):
    """Until its step is over, which may take minutes."""
    mailbox.post(Status(phase="training", steps=3), ())
    coordinator.until_report(lambda m: m.steps == 3)
    mailbox.end(0, "asked to", "stopped")
    time.sleep(1.0)
    assert coordinator.reports.qsize() < 8


def progress(**fields):
    defaults = {"tokens": 0, "own_tokens": 0, "records_through": 0, "next_position": 0}
    return messages.Progress(**(defaults | fields))


def test_a_lost_coordinator_is_found_again(stack, coordinator, link, mailbox, wanted):
    records = tuple(Record(seq=n, kind="progress", step=0) for n in (1, 2))
    mailbox.post(Status(phase="training", steps=3), records)
    coordinator.until_report(lambda m: m.records == records)
    coordinator.session.send(progress(records_through=1))
    coordinator.session.send(messages.Granted(span=Span(0, 8), offset=0))
    assert wait_for_news(mailbox).grants
    assert coordinator.hellos.get(timeout=WAIT_S).steps == 0
    coordinator.server.stop(0.1)
    outstanding = Outstanding(fragment=0, tick=1, start=0, end=4, base=Version(), seq=1)
    mailbox.post(Status(phase="training", steps=4, outstanding=(outstanding,)))
    coordinator.welcome_versions = (Version(1, 7),)
    serve(stack, coordinator, bind=coordinator.address)
    back = coordinator.hellos.get(timeout=WAIT_S)
    assert (back.steps, back.outstanding) == (4, (outstanding,))
    assert (back.sequences_granted, back.records_through) == (8, 1)
    assert wanted.get(timeout=WAIT_S) == Wanted(0, Version(1, 7))
    report = coordinator.until_report(lambda m: m.records)
    assert report.records == records[1:]


def test_an_island_does_not_go_back_to_an_earlier_term(
    stack, coordinator, link, mailbox, wanted, caplog
):
    """Two coordinators at once, by a mistake: the first one has slept meanwhile. Why it
    is put off stands in the log once."""
    coordinator.session.fail(Busy("a new term is about to begin"))
    coordinator.term, coordinator.welcome_versions = 3, (Version(3, 7),)
    while wanted.get(timeout=WAIT_S) != Wanted(0, Version(3, 7)):
        pass
    coordinator.hellos.queue.clear()
    coordinator.term, coordinator.welcome_versions = 2, (Version(2, 9),)
    coordinator.session.fail(Busy("it wakes up"))
    for _ in range(3):
        assert coordinator.hellos.get(timeout=WAIT_S).term == 3
    told = [text for text in caplog.messages if "does not let it in yet" in text]
    assert len(told) == 1
    assert "in term 2, and this island has been in term 3" in told[0]
    assert wanted.empty()
    coordinator.term, coordinator.welcome_versions = 3, (Version(3, 8),)
    assert wanted.get(timeout=WAIT_S) == Wanted(0, Version(3, 8))
    assert mailbox.ending is None


@pytest.mark.parametrize(
    ("code", "message", "ending"),
    [
        ("fenced", "2 is here", Ending(3, "2 is here (fenced)", "refused")),
        ("finished", "done", Ending(0, "it came too late: done", "finished")),
    ],
)
def test_a_refusal_ends_the_loop_with_its_words(
    coordinator, link, mailbox, code, message, ending
):
    coordinator.session.close(Refused(code, message))
    wait_for_news(mailbox)
    assert mailbox.ending == ending


def test_refused_at_the_first_connection(coordinator, client, mailbox):
    coordinator.refusal = Refused("config", "other config")
    with pytest.raises(Refused, match="other config"):
        Link(Lanes(client, SIZES), hello, mailbox, DEADLINES).connect(WAIT_S)


@pytest.mark.parametrize("text", ["the run is over", "x" * 10_000])
def test_goodbye_is_the_last_word(coordinator, link, text):
    """It is cut to what a message may hold."""
    link.leave(Ending(0, text, "finished"), 5.0)
    goodbye = coordinator.until_report(lambda m: isinstance(m, messages.Goodbye))
    assert (goodbye.reason, goodbye.text) == ("finished", text[: messages.MAX_TEXT])


def test_an_end_does_not_wait_for_the_threads(stack, client, coordinator, mailbox):
    """With this budget they would look once a minute whether it ends."""
    link = Link(Lanes(client, SIZES), hello, mailbox, Deadlines(600.0))
    link.connect(WAIT_S)
    link.start()
    mailbox.post(Status(phase="training", steps=1))
    coordinator.until_report(lambda m: getattr(m, "phase", "") == "training")
    ending = Ending(1, "the machine is taken away", "preempted")
    closing = threading.Thread(target=link.leave, args=(ending, 600.0))
    closing.start()
    coordinator.until_report(lambda m: isinstance(m, messages.Goodbye))
    closing.join(Deadlines(600.0).report_s / 4)
    assert not closing.is_alive()


def test_ends_that_do_not_understand_each_other_part(coordinator, link, mailbox):
    """As of two versions: every connection ends at the first report."""

    def broken(session, message):
        raise RemoteProtocolError("record 1 cannot be understood")

    coordinator.receive = broken
    deadline = time.monotonic() + WAIT_S
    while mailbox.ending is None and time.monotonic() < deadline:
        mailbox.post(Status(phase="training", steps=1))
        time.sleep(0.01)
    ending = mailbox.ending
    assert (ending.exit_code, ending.reason) == (3, "refused")
    assert "5 connections in a row ended at once" in ending.text
    assert "record 1 cannot be understood" in ending.text
    assert coordinator.hellos.qsize() == 5


def test_deltas_are_sent_and_sent_again(coordinator, sender, mailbox):
    sender.put(0, 4, encoded(1.0))
    start, payload = coordinator.uploads.get(timeout=WAIT_S)
    assert (start.island, start.tick, start.total) == ("a", 4, 38 * 4)
    assert payload == np.ones(38, np.float32).tobytes()
    sender.resend(messages.ResendRequest(fragment=0, tick=4))
    again = coordinator.uploads.get(timeout=WAIT_S)
    assert again[1] == payload
    sender.resend(messages.ResendRequest(fragment=0, tick=3))
    sender.forget(0, 4)
    sender.resend(messages.ResendRequest(fragment=0, tick=4))
    sender.put(0, 5, encoded(2.0))
    newer = coordinator.uploads.get(timeout=WAIT_S)[0]
    assert newer.tick == 5


def test_a_busy_coordinator_is_asked_again(coordinator, sender, mailbox):
    coordinator.upload_errors = [Busy("later"), Busy("later")]
    sender.put(0, 4, encoded(1.0))
    assert coordinator.uploads.get(timeout=WAIT_S)[0].tick == 4
    sender.close(WAIT_S)
    assert mailbox.status().measures.bytes_up > 38 * 4


def test_a_delta_that_does_not_get_through_is_told_of(coordinator, sender, caplog):
    broken = RemoteProtocolError("damaged on the way")
    coordinator.upload_errors = [broken] * (2 * TOLD_FROM - 1)
    sender.put(0, 4, encoded(1.0))
    assert coordinator.uploads.get(timeout=WAIT_S)[0].tick == 4
    told = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert [f"not sent in {TOLD_FROM} attempts" in text for text in told] == [True]


def test_a_refused_delta_waits_for_its_verdict(coordinator, sender):
    coordinator.upload_errors = [Refused("stale", "too old")]
    sender.put(0, 4, encoded(1.0))
    assert coordinator.failed.get(timeout=WAIT_S).tick == 4
    # One thread sends: what it sends again, it sends before this.
    sender.put_anchor(0, Version(1, 3), encoded(1.0)[:1])
    assert coordinator.uploads.get(timeout=WAIT_S)[0].version == Version(1, 3)
    sender.resend(messages.ResendRequest(fragment=0, tick=4))
    assert coordinator.uploads.get(timeout=WAIT_S)[0].tick == 4


@pytest.fixture
def receiver(stack, client, mailbox):
    fetcher = Fetcher(Lanes(client, SIZES), IDENTITY, FakeExchange(), mailbox)
    receiver = Receiver(fetcher, mailbox, DEADLINES, [Version(1, 0)], None, 5.0)
    stack.callback(receiver.close, 5.0)
    return receiver


def source(version, *buffers, full=False):
    return FetchSource(
        version=version,
        count=0 if full else len(buffers),
        buffers=buffers,
    )


def payload(value):
    return bytes([value]) * FakeExchange.layouts_down[0].total_bytes


def test_join_then_chain(coordinator, receiver, mailbox):
    anchor = bytes(4 * 38)
    coordinator.source = source(Version(1, 2), anchor, full=True)
    coordinator.fetch_errors = [VersionGone("overtaken")]
    assert receiver.begin_join()() == [Version(1, 2)]
    assert mailbox.arrivals.pick(0, Version(1, 2)).anchor == (anchor,)
    coordinator.source = source(Version(1, 4), payload(1), payload(2))
    while not coordinator.requests.empty():
        coordinator.requests.get()
    receiver.start()
    receiver.want(Wanted(0, Version(1, 4)))
    assert wait_for_news(mailbox).adoptions == ((0, Version(1, 4)),)
    arrival = mailbox.arrivals.pick(0, Version(1, 4))
    assert arrival.publishes == ((payload(1),), (payload(2),))
    request = coordinator.requests.get(timeout=WAIT_S)
    assert (request.have, request.want) == (Version(1, 2), Version(1, 4))
    receiver.want(Wanted(0, Version(1, 3)))  # Known: nothing is fetched.
    measures = mailbox.status().measures
    assert measures.bytes_join >= len(anchor)
    assert measures.bytes_down >= 2 * len(payload(1))


class EarlyFetcher:
    """Fetches anchors that land later; counts those of which bytes are kept."""

    def __init__(self, lanes):
        self.lanes, self.kept, self.counts = lanes, [], []

    def fetch(self, fetch):
        octets = np.zeros(38, np.float32)
        self.kept.append(weakref.ref(octets))
        view = memoryview(octets)
        return Arrival(fragment=fetch.fragment, version=fetch.want, octets=view)

    def landed(self, arrival):
        self.counts.append(sum(kept() is not None for kept in self.kept))
        return dataclasses.replace(arrival, anchor=(), octets=None)


def test_an_anchor_that_has_landed_is_in_the_hosts_memory_no_longer(client, mailbox):
    fetcher = EarlyFetcher(Lanes(client, SIZES))
    versions = [Version(1, 0)] * 3
    joined = Receiver(fetcher, mailbox, DEADLINES, versions, None, 5.0).begin_join()
    for thread in threading.enumerate():
        if thread.name.startswith("join"):
            thread.join(WAIT_S)
    assert joined() == versions
    assert fetcher.counts == [3, 2, 1]


def test_a_join_ends_with_the_island(coordinator, receiver):
    coordinator.fetch_errors = [VersionGone("gone")] * 1000
    joined = receiver.begin_join()
    receiver.close(0.0)  # As where its programs do not compile.
    with pytest.raises(ConnectionLost, match="ends before it has joined"):
        joined()


def test_a_chain_that_is_gone_is_fetched_in_full(coordinator, receiver, mailbox):
    anchor = bytes(4 * 38)
    coordinator.source = source(Version(1, 0), anchor, full=True)
    receiver.begin_join()()
    coordinator.requests.get(timeout=WAIT_S)
    coordinator.source = source(Version(2, 1), anchor, full=True)
    coordinator.fetch_errors = [VersionGone("not kept")]
    receiver.start()
    receiver.want(Wanted(0, Version(2, 1)))
    assert wait_for_news(mailbox).adoptions == ((0, Version(2, 1)),)
    assert mailbox.arrivals.pick(0, Version(2, 1)).anchor == (anchor,)
    asked = [coordinator.requests.get(timeout=WAIT_S).have for _ in range(2)]
    assert asked == [Version(1, 0), None]


@pytest.mark.parametrize(
    ("end", "error", "match"),
    [
        (lambda box: box.end(1, "the link failed"), VersionGone, "gone"),
        (lambda box: box.end(0, "asked to", "stopped"), ConnectionLost, "ends before"),
        (lambda box: box.end(1, "asked", "preempted"), ConnectionLost, "ends before"),
        (says.finished, Refused, "the run was over"),
    ],
)
def test_a_join_gives_up_when_the_island_must_end(
    coordinator, receiver, mailbox, end, error, match
):
    coordinator.fetch_errors = [VersionGone("gone")] * 1000
    end(mailbox)
    with pytest.raises(error, match=match):
        receiver.begin_join()()
    assert coordinator.requests.empty() == (error is not VersionGone)


FIRST, SECOND = ("127.0.0.1:1", "127.0.0.1:3"), ("127.0.0.1:1", "127.0.0.1:5")


def test_an_island_leaves_the_workers_of_a_lead_that_ended_and_tells_its_hosts():
    moved = []
    coordinator = Client(
        "127.0.0.1:7", tls=None, deadlines=Deadlines(1.0), bulk_channels=1
    )
    with contextlib.closing(coordinator):
        lanes = Lanes(coordinator, (10, 30, 20), moved.append)
        lanes.use(())
        assert (moved, lanes.dealt) == ([], (0, 0, 0))
        lanes.use(FIRST)
        lanes.use(FIRST)
        assert lanes.dealt == (1, 0, 1)
        stayed, left = (coordinator.transfers_at(a, w) for w, a in enumerate(FIRST))
        lanes.use(SECOND)
        assert moved == [FIRST, SECOND]
        assert coordinator.transfers_at(SECOND[0], 0) is stayed
        with pytest.raises(ConnectionLost, match="closed"):
            left.fetch(
                FetchRequest(
                    run_id="r",
                    island="a",
                    incarnation=1,
                    session="s",
                    fragment=0,
                    want=Version(1, 1),
                    have=None,
                ),
                max_bytes=8,
            )
