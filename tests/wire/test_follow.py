"""The stream of a standby: who may follow, what comes, and how it ends."""

from __future__ import annotations

import contextlib
import queue
import shutil
from pathlib import Path

import pytest
from wire_support import WAIT_S, deadlines

from diloco_jax.wire import certificates as authority
from diloco_jax.wire import follow
from diloco_jax.wire.encoding import encode
from diloco_jax.wire.errors import Busy, LocalProtocolError, Refused
from diloco_jax.wire.following import FollowStream
from diloco_jax.wire.principal import COORDINATOR, OPERATOR, READER, STANDBY, island
from diloco_jax.wire.tls import TlsFiles

REQUEST = follow.FollowRequest(node="b", fingerprint="f")


class Sent:
    """Everything that one standby is sent, until it is ended."""

    def __init__(self):
        self.error = None
        self._queue = queue.Queue()

    def messages(self):
        yield encode(follow.CopyBegins(run_id="r"))
        yield encode(follow.CopyWhole(number=7))
        self._queue.get(timeout=WAIT_S)

    def end(self, error=None):
        self.error = self.error or error
        self._queue.put(None)


class Primary:
    """Takes everybody, and notes what is answered."""

    def __init__(self):
        self.answers, self.requests = queue.Queue(), []

    @contextlib.contextmanager
    def followed(self, request):
        self.requests.append(request)
        self.sent = Sent()
        yield self.sent

    def answered(self, outgoing, number):
        self.answers.put((outgoing, number))


@pytest.fixture
def primary():
    return Primary()


@pytest.fixture
def folder(certificates, tmp_path) -> Path:
    """Certificates, with one of a standby."""
    folder = Path(shutil.copytree(certificates, tmp_path / "copy"))
    authority.add(folder, [], 1, standby=True)
    return folder


def follows(address, tls=None, request=REQUEST):
    return FollowStream(
        address, request, tls=tls, insecure=False, deadlines=deadlines()
    )


def test_a_standby_answers_what_it_got_and_is_told_why_it_ends(serve, primary):
    server, address = serve()
    server.primary = primary
    stream, got = follows(address), []

    def take(message):
        got.append(message)
        if isinstance(message, follow.CopyWhole):
            stream.answer(message.number)
            assert primary.answers.get(timeout=WAIT_S) == (primary.sent, 7)
            primary.sent.end(Busy("the mandate is lost"))

    with pytest.raises(Busy, match="the mandate is lost"):
        stream.run(take)
    assert primary.requests == [REQUEST]
    assert got == [follow.CopyBegins(run_id="r"), follow.CopyWhole(number=7)]


def test_a_coordinator_without_a_mandate_has_no_standby(serve):
    _, address = serve()
    with pytest.raises(Busy, match=r"set placement\.mandate for both"):
        follows(address).run(print)


def test_a_stream_that_begins_with_something_else_is_refused(serve, primary):
    server, address = serve()
    server.primary = primary
    with pytest.raises(LocalProtocolError, match="expected FollowRequest"):
        follows(address, request=follow.Answered(number=1)).run(print)
    assert primary.requests == []


def test_what_the_standby_raises_ends_the_stream(serve, primary):
    server, address = serve()
    server.primary = primary

    def full(message):
        raise OSError(28, "no space")

    with pytest.raises(OSError, match="no space"):
        follows(address).run(full)
    assert primary.sent._queue.get(timeout=WAIT_S) is None


def test_only_a_standby_follows(serve, primary, tls, folder):
    """A copy of everything goes to it."""
    server, address = serve(tls=tls["coordinator"])
    server.primary = primary
    for who in (island("a"), READER, OPERATOR):
        stream = follows(address, TlsFiles.load(folder, who))
        with pytest.raises(Refused, match=f"for the standby.* of {who}") as refused:
            stream.run(print)
        assert refused.value.code == "identity"
    assert primary.requests == []
    for who in (STANDBY, COORDINATOR):
        stream = follows(address, TlsFiles.load(folder, who))
        with pytest.raises(Busy, match="enough"):
            stream.run(lambda message: primary.sent.end(Busy("enough")))


def test_islands_trust_the_standbys_server(serve, connect, tls, folder):
    _, address = serve(tls=TlsFiles.load(folder, STANDBY))
    assert connect(address, tls=tls["island"]).status(WAIT_S)["islands"]
