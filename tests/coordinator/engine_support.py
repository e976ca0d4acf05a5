"""An island that answers takes, beside a real engine."""

from __future__ import annotations

import msgspec

from diloco_jax.coordinator.journal import read
from diloco_jax.protocol import holding, messages
from diloco_jax.protocol.coordinator.state import Said
from diloco_jax.protocol.holding import DeltaArrived
from diloco_jax.protocol.messages import DeltaKey, Hello, Record, Report
from diloco_jax.wire import bulk

WAIT_S = 60.0


class Island:
    """Stands in for `Sessions`: one island, which answers takes with zeros, and
    remembers what the log held when it was told of something."""

    def __init__(self, folder) -> None:
        self.seen, self.sent = [], []
        self.answers = True
        self.engine = self.inbox = self.store = None
        self._folder, self._seq = folder, 0

    @property
    def refused(self):
        """(session, message) of every Refused."""
        return [
            (session, message)
            for session, message in self.sent
            if isinstance(message, messages.Refused)
        ]

    def tell(self, session, message) -> None:
        self.sent.append((session, message))
        durable_now = [record["kind"] for record in read(self._folder, -1)]
        self.seen.append((message, durable_now))
        if isinstance(message, messages.TakeRequest) and self.answers:
            self._answer(message)

    def connected(self) -> list[str]:
        return ["a"]

    def told(self, kind):
        """(message, kinds of records in the log at that moment) of this type."""
        return [(m, d) for m, d in self.seen if isinstance(m, kind)]

    def _answer(self, take: messages.TakeRequest) -> None:
        self._seq += 1
        total = self.store.layouts_up[take.fragment].total_bytes
        start = bulk.UploadStart(
            run_id="r",
            island="a",
            incarnation=1,
            session="s",
            fragment=take.fragment,
            tick=take.tick,
            offset=0,
            length=total,
            total=total,
        )
        place = self.inbox.begin(start)
        place[:] = bytes(total)
        self.inbox.end(start, place)
        key = DeltaKey("a", 1, take.fragment, take.tick)
        payload = self.inbox.payload(key)
        self.inbox.checked(key, self.store.squares(take.fragment, payload))
        took = Record(
            seq=self._seq,
            kind="took",
            step=2,
            fragment=take.fragment,
            tick=take.tick,
        )
        self.engine.post(report(2, took))
        self.engine.post(
            DeltaArrived(
                island="a", incarnation=1, fragment=take.fragment, tick=take.tick
            )
        )


class Piped:
    """A holder to which every message goes as bytes, and whose messages come so."""

    def __init__(self, holder) -> None:
        self._holder = holder
        self.passed = []
        """Names of the messages, in their order."""

    def hold(self, message) -> None:
        self._holder.hold(self._through(message, holding.ToHolder))

    def answer(self, tell, failed) -> None:
        self._holder.answer(
            lambda message: tell(self._through(message, holding.FromHolder)), failed
        )

    def __getattr__(self, name):
        return getattr(self._holder, name)

    def _through(self, message, kind):
        self.passed.append(type(message).__name__)
        return as_bytes(message, kind)


def as_bytes(message, kind):
    """A message of this kind, as it is at the other end."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def report(steps, *records, island="a", session="s"):
    message = Report(phase="training", steps=steps, step_seconds=0.1, records=records)
    return Said(island=island, session=session, message=message)


def hello(name, session=None):
    return Hello(
        island=name,
        incarnation=1,
        session=session or name,
        run_id="",
        fingerprint="f",
        tokens_per_step=10,
        sequences_per_step=1,
    )
