"""The island's half is one: a rule that is changed in `protocol/island/` is followed by
the product's threads, by virtual time and by replay."""

from __future__ import annotations

import dataclasses
import threading
from types import SimpleNamespace
from typing import Any, cast

import coordinator_says as says
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.config import Config, IslandConfig, Placement, RunConfig
from diloco_jax.config.placement import Deadlines
from diloco_jax.config.resolving import LONG
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.island.link import Link
from diloco_jax.island.loop import Loop
from diloco_jax.island.mailbox import Arrival, LiveDecisions, Mailbox
from diloco_jax.island.timing import Pace, Timing, goal_of
from diloco_jax.island.transfers import Receiver
from diloco_jax.observability.tape import TapeError
from diloco_jax.protocol.coordinator.state import Said
from diloco_jax.protocol.island.boundary import Books, Boundary, Ending, Goal
from diloco_jax.protocol.island.conversation import Fetching, Wanted
from diloco_jax.protocol.island.reporting import Introduction, Reporting, Status, hello
from diloco_jax.protocol.messages import (
    Granted,
    Published,
    Report,
    Span,
    Version,
    Welcome,
)
from diloco_jax.simulation.clock import Clock, Line, LineSpeed
from diloco_jax.simulation.island import IslandSpec, NoBody, VirtualFetch, VirtualIsland
from diloco_jax.simulation.replay.recording import Life, TapedRecord, Who
from diloco_jax.simulation.replay.replay import ReplayedIsland

WAIT_S = 60.0
STEPS = 12
ISLAND = IslandConfig(batch_size=2)
RUN = RunConfig(
    sequence_length=16,
    total_tokens=STEPS * 2 * 16,
    sync=dataclasses.replace(LONG, fragments=3),
)
BEGIN = (Version(1, 3), Version(1, 1), Version(1, 2))
NEWEST = Version(1, 4)


# ---- the product ------------------------------------------------------------------


def trained() -> int:
    """Steps that the train loop makes before it waits for the run's end."""
    mailbox, goal = Mailbox(), goal_of(RUN, ISLAND.batch_size)
    copy = SimpleNamespace(
        step=lambda batch, rate: {"loss": jnp.zeros(()), "tokens": 0.0, "skipped": 0},
        adoptions=0,
    )
    data = SimpleNamespace(ready=True, next_batch=lambda timeout_s: None)
    decisions = LiveDecisions(mailbox, lambda: False, last_s=1.0)
    loop = Loop(
        config=Config(run=RUN, islands={"a": ISLAND}, placement=Placement()),
        name="a",
        replica=cast(Any, copy),
        boundary=Boundary(
            Books(BEGIN, ADOPT_RULES.find("keep")),
            goal,
            arrays=cast(Any, copy),
            incoming=mailbox.arrivals,
            outgoing=cast(Any, None),
            data=cast(Any, data),
        ),
        data=cast(Any, data),
        mailbox=mailbox,
        decisions=decisions,
        pace=Pace(RUN, goal),
        timing=Timing(0.0),
        evaluator=cast(Any, SimpleNamespace(due=lambda step: False)),
        send_anchor=lambda fragment, version: None,
        patience_s=Placement().patience_s,
    )
    decisions.wait = lambda timeout_s: says.finished(mailbox)  # type: ignore[method-assign]
    loop.run()
    return mailbox.status().steps


def fetched_by_threads() -> list[int]:
    """Fragments in the order in which the receiver fetches them after a join."""
    fetched: list[int] = []
    joined, done = threading.Event(), threading.Event()

    def fetch(request: Any) -> Arrival:
        if joined.is_set():
            fetched.append(request.fragment)
            if len(fetched) == len(BEGIN):
                done.set()
        return Arrival(fragment=request.fragment, version=request.want, anchor=())

    lanes = SimpleNamespace(dealt=(0,) * len(BEGIN))
    receiver = Receiver(
        cast(Any, SimpleNamespace(fetch=fetch, landed=lambda of: of, lanes=lanes)),
        Mailbox(),
        Deadlines(WAIT_S),
        BEGIN,
        None,
        WAIT_S,
    )
    receiver.begin_join()()
    joined.set()
    for fragment in range(len(BEGIN)):
        receiver.want(Wanted(fragment, NEWEST))
    receiver.start()
    assert done.wait(WAIT_S)
    receiver.close(WAIT_S)
    return fetched


class Streams:
    """A coordinator for a link that keeps its reports."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._changed = threading.Condition()

    def open_control(self, hello: Any) -> Any:
        welcome = Welcome(run_id="r", term=1, resumed=False, versions=())
        return SimpleNamespace(
            welcome=welcome,
            send=self.send,
            receive=lambda timeout_s: None,
            close=lambda timeout_s: None,
        )

    def send(self, message: Any) -> None:
        with self._changed:
            if isinstance(message, Report):
                self.steps.append(message.steps)
            self._changed.notify_all()

    def until(self, step: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: step in self.steps, WAIT_S)


WHO = Introduction(
    island="a",
    incarnation=1,
    session="s",
    fingerprint="f",
    tokens_per_step=32,
    sequences_per_step=2,
)


def reported_by_threads(steps: tuple[int, ...]) -> set[int]:
    """Return the steps of the link's reports; wait for the report of each of these."""
    streams, mailbox = Streams(), Mailbox()
    deadlines = Deadlines(10 * WAIT_S)  # No sign of life comes in between.
    link = Link(
        cast(Any, streams), lambda status: hello(WHO, status), mailbox, deadlines
    )
    link.connect(WAIT_S)
    reports = threading.Thread(target=link._report, daemon=True)
    reports.start()
    for step in range(STEPS):
        mailbox.post(Status(phase="training", steps=step), ())
        if step in steps:
            streams.until(step)
    link._closing.set()
    mailbox.end(*Ending(0, "end of test", "stopped"))
    reports.join(WAIT_S)
    assert not reports.is_alive()
    return set(streams.steps)


# ---- virtual time -----------------------------------------------------------------


class Service:
    """A coordinator for one island: asks nothing, publishes when it is told to."""

    serves = True
    config = cast(Any, SimpleNamespace(fingerprint="f", regions={}))

    def __init__(self) -> None:
        self.clock, self.versions = Clock(), list(BEGIN)
        self.fetched: list[int] = []
        self.reports: list[Report] = []
        self.island = VirtualIsland(
            IslandSpec(name="a", batch_size=2, step_seconds=lambda step: 1.0),
            1,
            RUN,
            self.clock,
            NoBody(),
            report_s=600.0,
        )
        self.island.connect(self, Line(self.clock, LineSpeed(latency_s=0.1)))

    def hello(self, hello: Any, peer: Any) -> None:
        peer.send(Welcome(run_id="r", term=1, resumed=False, versions=BEGIN))
        peer.send(Granted(span=Span(0, 1000), offset=0))

    def hear(self, event: Any) -> None:
        assert isinstance(event, Said)
        assert isinstance(event.message, Report)
        self.reports.append(event.message)

    def arrived(self, key: Any, encoded: Any) -> None:
        raise AssertionError("nothing was asked for")

    def fetch(self, fragment: int, want: Version, have: Version | None) -> VirtualFetch:
        if have is not None:
            self.fetched.append(fragment)
        return VirtualFetch(self.versions[fragment], 0, None)

    def publish(self) -> None:
        """A new version of every fragment, told in the order of their numbers."""
        self.versions = [NEWEST] * len(BEGIN)
        peer = self.island.peer
        assert peer is not None
        # While something else is fetched: what comes next is then decided.
        for fragment in (0, 1, 2):
            peer.send(Published(fragment=fragment, version=NEWEST))

    def run(self) -> Service:
        self.clock.at(5.5, self.publish)
        self.clock.run(until=100.0)
        return self


# ---- replay -----------------------------------------------------------------------


class Worker:
    """Keeps the calls that it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def send(self, who: Who, *call: Any) -> bytes:
        self.calls.append(call)
        return b""

    ask = send


def replayed(service: Service, steps: int = STEPS) -> list[tuple[Any, ...]]:
    """Return the calls that replay makes on a model copy for the virtual island's
    reports and this number of steps."""
    records = [record for report in service.reports for record in report.records]
    life = Life(
        who=Who("a", 1),
        config=ISLAND,
        environment={},
        total_tokens=RUN.total_tokens,
        records=[TapedRecord(n, record) for n, record in enumerate(records, start=1)],
    )
    life.saves.add(steps)
    worker = Worker()
    published = SimpleNamespace(
        anchor=lambda fragment, version: b"",
        chain=lambda fragment, have, want: [b""] * (want.number - have.number),
    )
    windows = SimpleNamespace(batch=lambda positions: np.zeros((2, 17), np.int32))
    island = ReplayedIsland(
        life, RUN, cast(Any, windows), cast(Any, published), cast(Any, worker)
    )
    island.moments(steps)
    return worker.calls


# ---- the rules --------------------------------------------------------------------


def test_the_fetch_order_is_the_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(order: list[int]) -> None:
        service = Service().run()
        assert fetched_by_threads() == order
        assert service.fetched[1:] == [f for f in order if f != service.fetched[0]]
        adopted = [c[1] for c in replayed(service) if c[0] == "adopt"]
        assert adopted == service.fetched

    check([1, 2, 0])
    monkeypatch.setattr(Fetching, "order", lambda fetching, fragment: -fragment)
    check([2, 1, 0])


def test_the_report_cadence_is_the_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps_of(service: Service) -> set[int]:
        return {report.steps for report in service.reports}

    everything = tuple(range(STEPS))
    assert reported_by_threads(everything) == set(everything)
    usual = Service().run()
    assert set(everything) <= steps_of(usual)

    def has_news(said: Reporting, status: Status, newest_record: int) -> bool:
        return status.steps % 3 == 0 and (status.phase, status.steps) != said._said

    monkeypatch.setattr(Reporting, "has_news", has_news)
    thirds = tuple(range(0, STEPS, 3))
    assert reported_by_threads(thirds) == set(thirds)
    sparse = Service().run()
    assert steps_of(sparse) == {*thirds, STEPS}
    # Replay has no cadence: however the records came, they are the same life.
    assert kinds(replayed(sparse)) == kinds(replayed(usual))


def kinds(calls: list[tuple[Any, ...]]) -> list[str]:
    return [call[0] for call in calls]


def test_the_end_of_steps_is_the_protocols(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service().run()
    assert (trained(), service.island.steps) == (STEPS, STEPS)
    assert kinds(replayed(service)).count("step") == STEPS

    def half(goal: Goal, step: int, others_tokens: int, *, stop: bool) -> bool:
        return not stop and goal.share_done(step, others_tokens) < 0.5

    monkeypatch.setattr(Goal, "may_step", half)
    half_way = Service().run()
    assert (trained(), half_way.island.steps) == (STEPS // 2, STEPS // 2)
    assert kinds(replayed(half_way, STEPS // 2)).count("step") == STEPS // 2
    with pytest.raises(TapeError, match="did step 6 although the run had its tokens"):
        replayed(service)
