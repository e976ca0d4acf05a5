"""Links and senders to a coordinator of `link_support`."""

import contextlib
import queue

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
