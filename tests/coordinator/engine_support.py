"""An island that answers takes, beside a real engine."""

from __future__ import annotations

import msgspec
from inbox_support import put, start

from diloco_jax.config import Placement, RunConfig
from diloco_jax.config.resolving import LONG
from diloco_jax.coordinator.journal import read
from diloco_jax.coordinator.roster import Roster
from diloco_jax.coordinator.settings import policy_config
from diloco_jax.protocol import holding, messages
from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.state import Said, initial
from diloco_jax.protocol.holding import DeltaArrived
from diloco_jax.protocol.messages import DeltaKey, Hello, Measures, Record, Report

WAIT_S = 60.0
AT = 1000.0


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
        place = {"fragment": take.fragment, "tick": take.tick}
        put(self.inbox, start(0, total, total, **place), 0)
        key = DeltaKey("a", 1, **place)
        payload = self.inbox.payload(key)
        self.inbox.checked(key, self.store.squares(take.fragment, payload))
        took = Record(seq=self._seq, kind="took", step=2, **place)
        self.engine.post(report(2, took))
        self.engine.post(DeltaArrived(**key._asdict()))


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


def run_of(*names, **measures):
    """Config, state and roster of a run whose islands have made three steps since
    `AT`."""
    config = policy_config(RunConfig(sync=LONG), Placement(), "r", (7, 3))
    now, roster = initial(config), Roster()
    for name in names:
        said = hello(name, fingerprint=config.fingerprint)
        for event in (said, report(3, island=name, session=name)):
            now, _ = decide.step(config, now, event, AT)
        roster.hello(said, AT)
        roster.report(name, Measures(steps=3, **measures), (), AT + 8)
    return config, now, roster


def report(steps, *records, island="a", session="s"):
    message = Report(phase="training", steps=steps, step_seconds=0.1, records=records)
    return Said(island=island, session=session, message=message)


def hello(name="a", **changes):
    fields = {"island": name, "incarnation": 1, "session": name, "run_id": ""}
    fields |= {"fingerprint": "f", "tokens_per_step": 10, "sequences_per_step": 1}
    return Hello(**{**fields, **changes})
