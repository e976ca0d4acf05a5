"""The notice of preemption: where it comes from, and what is done with its seconds."""

import http.server
import threading
import time

import coordinator_says as says
import pytest

from diloco_jax.island import watches
from diloco_jax.island.hosts import world
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.island.watches import Preemption
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.island.reporting import Status

WAIT_S = 60.0
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


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However slow a server is, it is one."""
    monkeypatch.setattr(world, "METADATA_ANSWER_S", WAIT_S)


@pytest.fixture
def mailbox():
    return Mailbox()


def wait_for_end(mailbox):
    deadline = time.monotonic() + WAIT_S
    while mailbox.ending is None and time.monotonic() < deadline:
        mailbox.wait(deadline - time.monotonic())
        mailbox.decide()
    return mailbox.ending


# ---- where it comes from ---------------------------------------------------------


def test_the_metadata_servers_notice_ends_the_loop(server, mailbox):
    watch = Preemption(mailbox, notice_s=5).watch(server.address)
    assert mailbox.ending is None
    server.preempted.set()
    text = "preempted (the metadata server)"
    assert wait_for_end(mailbox) == Ending(1, text, "preempted")
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
    monkeypatch.setattr(watches, "AWAY_S", 0.01)
    server.answers = [200, 503, 503]
    server.preempted.set()
    monkeypatch.setattr(watches, "_ask", hiding_the_first(watches._ask))
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


@pytest.fixture
def training(mailbox):
    mailbox.post(Status(phase="training", steps=4))
    return mailbox


def test_the_loop_ends_once_the_island_is_let_go(training):
    says.may_leave(training)  # Of another time: nothing was asked for yet.
    Preemption(training, notice_s=WAIT_S).notice("SIGTERM")
    deadline = time.monotonic() + WAIT_S
    while not (decision := training.decide()).leaving:
        assert time.monotonic() < deadline
        training.wait(0.05)
    assert (decision.stop, decision.ending) == (True, None)
    training.wait(0.2)
    assert training.ending is None
    says.may_leave(training)
    assert wait_for_end(training) == Ending(1, "preempted (SIGTERM)", "preempted")


def test_it_does_not_wait_longer_than_the_notice(training):
    Preemption(training, notice_s=0.05).notice("SIGTERM")
    assert wait_for_end(training).exit_code == 1


def test_two_sources_tell_of_one_notice(training):
    notice = Preemption(training, notice_s=WAIT_S)
    notice.notice("SIGTERM")
    notice.notice("the metadata server")
    training.end(0, "finished")
    assert wait_for_end(training) == Ending(0, "finished")


def test_an_island_that_is_joining_leaves_at_once(mailbox):
    mailbox.post(Status(phase="compiling"))
    Preemption(mailbox, notice_s=WAIT_S).notice("SIGTERM")
    assert wait_for_end(mailbox) == Ending(1, "preempted (SIGTERM)", "preempted")
    assert not mailbox.decide().leaving
