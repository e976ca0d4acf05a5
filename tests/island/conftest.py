"""Links and senders to a coordinator of `link_support`; a cloud's metadata server."""

import contextlib
import http.server
import queue
import threading

import pytest
from link_support import (
    DEADLINES,
    IDENTITY,
    PIECES,
    SIZES,
    WAIT_S,
    Coordinator,
    hello,
    serve,
)

from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import PayloadLayout
from diloco_jax.island.link import Link
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.island.transfers import Lanes, Sender
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.island.conversation import Wanted
from diloco_jax.protocol.messages import ResendRequest
from diloco_jax.wire.client import Client


@pytest.fixture
def coordinator():
    return Coordinator()


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def client(stack, coordinator):
    coordinator.server, coordinator.address = serve(stack, coordinator)
    client = Client(coordinator.address, tls=None, deadlines=DEADLINES, bulk_channels=1)
    stack.callback(client.close)
    return client


@pytest.fixture
def mailbox():
    return Mailbox()


@pytest.fixture
def wanted():
    return queue.Queue()


@pytest.fixture
def link(stack, client, mailbox, wanted):
    link = Link(Lanes(client, SIZES), hello, mailbox, DEADLINES)
    link.resent = queue.Queue()
    link.connect(WAIT_S)
    mailbox.errands = {Wanted: wanted.put, ResendRequest: link.resent.put}
    link.start()
    stack.callback(link.leave, Ending(0, "end of test", "stopped"), 5.0)
    return link


@pytest.fixture
def sender(stack, client, mailbox):
    layouts = (PayloadLayout.of(get_codec("f32"), PIECES),) * 2
    whole = (PayloadLayout.of(get_codec("f32"), PIECES[:1]),) * 2
    lanes = Lanes(client, SIZES)
    sender = Sender(lanes, IDENTITY, layouts, whole, mailbox, DEADLINES)
    sender.start()
    stack.callback(sender.close, 5.0)
    return sender


class MetadataServer(http.server.ThreadingHTTPServer):
    """Answers what `answers` says, a status and a text, one after the other; then TRUE
    once `preempted` is set."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), MetadataHandler)
        self.address = f"127.0.0.1:{self.server_port}"
        self.answers, self.paths, self.flavor = [], [], "Google"
        self.preempted = threading.Event()


class MetadataHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.paths.append(self.path)
        if server.answers:
            status, text = server.answers.pop(0)
        else:
            if "wait_for_change" in self.path:
                assert server.preempted.wait(WAIT_S)
            status, text = 200, "TRUE" if server.preempted.is_set() else "FALSE"
        asked_rightly = self.headers["Metadata-Flavor"] == "Google"
        self.send_response(status if asked_rightly else 403)
        self.send_header("Metadata-Flavor", server.flavor)
        self.send_header("ETag", "tag 1")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(monkeypatch):
    with MetadataServer() as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.address)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.preempted.set()
        server.shutdown()
        thread.join(WAIT_S)
