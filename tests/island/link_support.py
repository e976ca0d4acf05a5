"""A coordinator for links, senders and receivers to talk to, over real gRPC; and the
store through which hosts talk."""

import queue
import threading

import jax
import numpy as np

from diloco_jax.config.placement import Deadlines
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import Piece
from diloco_jax.protocol import messages
from diloco_jax.protocol.messages import Version
from diloco_jax.wire.bulk import Identity
from diloco_jax.wire.server import Server

WAIT_S = 60.0
PIECES = (Piece(("w",), -1, (8, 4), False), Piece(("v",), -1, (6,), False))
SIZES = (38, 38)
IDENTITY = Identity(run_id="r", island="a", incarnation=1, session="s")


class Hasty(Deadlines):
    """A fast test's pauses, a slow machine's deadlines."""

    report_s = 0.2
    retry_min_s = 0.02
    retry_max_s = 0.2


DEADLINES = Hasty(60.0)


class Coordinator:
    """Welcomes, keeps what comes, and serves what it is told to."""

    def __init__(self):
        self.hellos, self.reports = queue.Queue(), queue.Queue()
        self.uploads, self.requests = queue.Queue(), queue.Queue()
        self.failed = queue.Queue()
        self.welcome_versions, self.term = (Version(1, 0),), 1
        self.refusal = None
        self.upload_errors, self.fetch_errors = [], []
        self.source = None
        self.session = None

    def connect(self, hello, session):
        if self.refusal:
            raise self.refusal
        self.session = session
        session.send(
            messages.Welcome(
                run_id="r",
                term=self.term,
                resumed=False,
                versions=self.welcome_versions,
                anew=(0,) if self.term > 1 else (),
            )
        )
        self.hellos.put(hello)

    def receive(self, session, message):
        self.reports.put(message)

    def disconnect(self, session):
        pass

    def upload_begin(self, start):
        if self.upload_errors:
            self.failed.put(start)
            raise self.upload_errors.pop(0)
        self.place = bytearray(start.total)
        return memoryview(self.place)[start.offset : start.offset + start.length]

    def upload_end(self, start, place):
        self.uploads.put((start, bytes(self.place)))
        return True

    def fetch(self, request):
        if request.offset == 0:
            self.requests.put(request)
            if self.fetch_errors:
                raise self.fetch_errors.pop(0)
        return self.source

    def status(self):
        return {}

    def until_report(self, wanted):
        """The first message for which `wanted` holds."""
        while not wanted(message := self.reports.get(timeout=WAIT_S)):
            pass
        return message


def serve(stack, coordinator, bind="127.0.0.1:0"):
    server = Server(
        bind,
        coordinator,
        tls=None,
        deadlines=DEADLINES,
        max_islands=2,
        max_hosts=2,
        bulk_channels=1,
    )
    address = server.start()
    stack.callback(server.stop, 0.1)
    return server, address


def hello(status):
    return messages.Hello(
        run_id="r",
        fingerprint="f",
        run={},
        plan="p",
        island="a",
        island_config={},
        incarnation=1,
        session="s",
        environment={},
        tokens_per_step=1,
        sequences_per_step=1,
        phase=status.phase,
        steps=status.steps,
        step_seconds=0.0,
        outstanding=status.outstanding,
        sequences_granted=status.sequences_granted,
        records_through=status.records_through,
        term=status.term,
    )


def wait_for_news(mailbox):
    mailbox.wait(WAIT_S)
    return mailbox.decide()


def encoded(value):
    codec = get_codec("f32")
    return tuple(codec.encode(np.full(p.shape, value, np.float32)) for p in PIECES)


class Store:
    """The key-value store of a `jax.distributed` world."""

    def __init__(self):
        self._told, self._changed = {}, threading.Condition()

    def key_value_set_bytes(self, key, value):
        with self._changed:
            self._told.setdefault(key, value)
            self._changed.notify_all()

    def blocking_key_value_get_bytes(self, key, timeout_ms):
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._told, timeout_ms / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: not set")
            return self._told[key]

    def key_value_try_get_bytes(self, key):
        with self._changed:
            if key not in self._told:
                raise jax.errors.JaxRuntimeError("NOT_FOUND: not set")
            return self._told[key]

    def key_value_delete(self, key):
        with self._changed:
            self._told.pop(key, None)  # It may never have been set.

    def keys(self):
        with self._changed:
            return sorted(self._told)
