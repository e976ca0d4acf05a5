"""The notice of preemption: where it comes from, and what is done with its seconds."""

import http.server
import threading
import time

import pytest

from diloco_jax.island import preemption
from diloco_jax.island.mailbox import Ending, Mailbox, Status
from diloco_jax.island.preemption import Preemption
from diloco_jax.policy.events import ARRIVED, Outstanding, Version
from diloco_jax.wire.messages import TakeVerdict

WAIT_S = 20.0
FLAVOR = {"Metadata-Flavor": "Google"}


class Server(http.server.ThreadingHTTPServer):
    """A metadata server; it answers what `answers` says, one after the other, then
    TRUE once `preempted` is set."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.preempted = threading.Event()
        self.answers = []
        self.paths = []
        self.flavor = FLAVOR
        self.address = f"127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.paths.append(self.path)
        status = server.answers.pop(0) if server.answers else 200
        if self.headers["Metadata-Flavor"] != "Google":
            status = 403
        if status == 200 and "wait_for_change" in self.path:
            assert server.preempted.wait(WAIT_S)
        body = b"TRUE" if server.preempted.is_set() else b"FALSE"
        self.send_response(status)
        for name, value in (server.flavor | {"ETag": "tag 1"}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.preempted.set()
        server.shutdown()
        thread.join(WAIT_S)


@pytest.fixture
def mailbox():
    return Mailbox()


def wait_for_end(mailbox):
    deadline = time.monotonic() + WAIT_S
    while mailbox.ending is None and time.monotonic() < deadline:
        mailbox.wait(deadline - time.monotonic())
        mailbox.collect()
    return mailbox.ending


def verdict(tick, what="merged", reason=""):
    return TakeVerdict(
        fragment=0, tick=tick, verdict=what, reason=reason, version=Version()
    )


def outstanding(tick):
    return Outstanding(fragment=0, tick=tick, start=0, end=4, base=Version(), seq=1)


# ---- where it comes from ---------------------------------------------------------


def test_the_metadata_servers_notice_ends_the_loop(server, mailbox):
    watch = Preemption(mailbox, notice_s=5).watch(server.address)
    assert mailbox.ending is None
    server.preempted.set()
    assert wait_for_end(mailbox) == Ending(1, "preempted (the metadata server)")
    watch.join(WAIT_S)
    assert not watch.is_alive()
    first, *others = server.paths
    assert first == "/computeMetadata/v1/instance/preempted"
    assert all("wait_for_change=true&last_etag=tag+1&" in path for path in others)


def test_a_notice_that_was_given_before_is_seen_at_once(server, mailbox, monkeypatch):
    server.preempted.set()
    monkeypatch.setenv("GCE_METADATA_HOST", server.address)
    Preemption(mailbox, notice_s=5).watch()
    assert wait_for_end(mailbox).exit_code == 1


def test_a_server_that_is_away_for_a_moment_is_asked_again(
    server, mailbox, monkeypatch
):
    monkeypatch.setattr(preemption, "ANSWER_S", 0.01)
    server.answers = [200, 503, 503]
    server.preempted.set()
    monkeypatch.setattr(preemption, "_ask", hiding_the_first(preemption._ask))
    Preemption(mailbox, notice_s=5).watch(server.address)
    assert wait_for_end(mailbox).exit_code == 1
    assert len(server.paths) == 4


def hiding_the_first(ask):
    """As `ask`, but the first value is FALSE."""
    answers = iter(("FALSE",))
    return lambda *arguments: (next(answers, (found := ask(*arguments))[0]), found[1])


def test_where_there_is_no_such_server_nothing_happens(server, mailbox):
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as closed:
        nobody = f"127.0.0.1:{closed.server_port}"
    server.answers = [404]
    for address in (nobody, server.address):
        watch = Preemption(mailbox, notice_s=5).watch(address)
        watch.join(WAIT_S)
        assert not watch.is_alive()
    server.preempted.set()
    server.flavor = {}  # Somebody else's server.
    watch = Preemption(mailbox, notice_s=5).watch(server.address)
    watch.join(WAIT_S)
    assert (watch.is_alive(), mailbox.ending) == (False, None)


def test_nothing_is_watched_where_machines_are_not_taken_away(server, mailbox):
    assert Preemption(mailbox, notice_s=0).watch(server.address) is None
    assert server.paths == []


def test_a_host_that_follows_tells_the_one_that_leads(server, mailbox):
    told = []
    server.preempted.set()
    watch = Preemption(mailbox, 5, tell_leader=told.append).watch(server.address)
    watch.join(WAIT_S)
    assert (told, mailbox.ending) == (["the metadata server"], None)


# ---- what is done with its seconds ------------------------------------------------


@pytest.mark.parametrize("end", [("merged", ""), ("pending", ARRIVED)])
def test_the_goodbye_waits_until_what_was_sent_has_arrived(mailbox, end):
    mailbox.post(Status(phase="training", steps=4, outstanding=(outstanding(3),)))
    notice = Preemption(mailbox, notice_s=WAIT_S)
    notice.notice("SIGTERM")
    left = []
    mailbox.judge(verdict(3, "pending"))
    mailbox.judge(verdict(2))
    draining = threading.Thread(target=lambda: left.append(notice.drain()))
    draining.start()
    draining.join(0.2)
    assert (mailbox.status().phase, left) == ("stopped", [])
    mailbox.judge(verdict(3, *end))
    draining.join(WAIT_S)
    assert left == [0]


def test_it_does_not_wait_longer_than_the_notice(mailbox):
    mailbox.post(Status(phase="training", steps=4, outstanding=(outstanding(3),)))
    notice = Preemption(mailbox, notice_s=0.05)
    notice.notice("SIGTERM")
    assert notice.drain() == 1


def test_without_a_notice_nothing_is_waited_for(mailbox):
    mailbox.post(Status(phase="training", steps=4, outstanding=(outstanding(3),)))
    assert Preemption(mailbox, notice_s=WAIT_S).drain() == 0
    assert mailbox.status().phase == "training"
