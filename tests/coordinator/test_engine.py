"""The engine carries out effects: durable first, visible afterwards."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from diloco_jax.coordinator import lead as lead_module
from diloco_jax.coordinator import log as durable
from diloco_jax.coordinator.inbox import Inbox
from diloco_jax.coordinator.lead import Lead
from diloco_jax.coordinator.log import RecordLog, read
from diloco_jax.coordinator.rooms import Rooms
from diloco_jax.faults import Fault, Faults
from diloco_jax.observability.metrics import Metrics
from diloco_jax.observability.tape import Tape, read_tape
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.events import DeltaArrived, Disconnected, Said
from diloco_jax.protocol.coordinator.state import PolicyConfig, initial
from diloco_jax.protocol.messages import Hello, Report
from diloco_jax.protocol.values import DeltaKey, Record, Version
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
        durable_now = [entry.record["kind"] for entry in read(self._folder, -1)]
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


@pytest.fixture
def island(tmp_path):
    return Island(tmp_path / "log")


@pytest.fixture
def make_engine(tmp_path, store, island):
    """An engine whose island does two steps, so that fragment 0 is merged; it runs
    until `done` holds."""
    files = []

    def make(done, log=None, faults=()):
        def keep_house(engine):
            if done() or time.monotonic() > deadline:
                engine.stop()

        deadline = time.monotonic() + WAIT_S
        config = PolicyConfig(
            run_id="r",
            fingerprint="f",
            fragment_sizes=store.plan.sizes,
            steps_per_cycle=4,
            overlap_steps=1,
            quorum=1,
            grace=0.0,
            grace_window="alike",
            partial_merges="scaled",
            max_staleness=1,
            total_tokens=10**9,
            lease_s=2 * WAIT_S,
            reunion_s=WAIT_S,
            compile_budget_s=2 * WAIT_S,
            outage_budget_s=1.0,
            flush_s=1.0,
        )
        island.inbox = Inbox(store.layouts_up, Rooms(1 << 20))
        island.store = store
        log = log or RecordLog(tmp_path / "log")
        files.extend((log, Tape(tmp_path / "tape.jsonl")))
        files.append(Metrics(tmp_path))
        engine = Lead(
            config,
            initial(config),
            store=store,
            inbox=island.inbox,
            log=log,
            tape=files[-2],
            metrics=files[-1],
            sessions=island,
            faults=Faults(tuple(faults)),
            housekeeping=keep_house,
        )
        island.engine = engine
        for event in (hello("a", "s"), report(0), report(2)):
            engine.post(event)
        return engine

    yield make
    for file in files:
        file.close()


def test_what_is_told_was_durable_before(make_engine, island, tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(
        durable.os, "fsync", lambda fd: (fsync(fd), synced.append(len(island.seen)))
    )
    engine = make_engine(done=lambda: island.told(messages.Published))
    engine.run()
    ((welcome, held),) = island.told(messages.Welcome)
    assert (welcome.run_id, held) == ("r", ["joined"])
    for number, (_, held) in enumerate(island.told(messages.Granted), start=1):
        assert held.count("granted") == number
    ((_, held),) = island.told(messages.TakeRequest)
    assert "ticks" in held
    ((published, held),) = island.told(messages.Published)
    assert (published.version, published.verdict) == (Version(1, 1), "merged")
    assert held[-1] == "merged"
    assert synced[-1] == len(island.seen) - 1  # between the message before and this
    entries = list(read(tmp_path / "log", -1))
    merged = entries[-1]
    source = island.store.fetch(0, Version(1, 1), Version(1, 0))
    assert merged.payload == b"".join(bytes(b) for b in source.buffers)
    on_tape = [r for r in read_tape(tmp_path / "tape.jsonl") if r["kind"] == "merged"]
    assert [r["digest"] for r in on_tape] == [merged.record["digest"]]


def test_merges_wait_for_the_compiler_and_the_tape_tells_how_long(
    make_engine, island, tmp_path
):
    make_engine(done=lambda: island.told(messages.Published)).run()
    kinds = [record["kind"] for record in read_tape(tmp_path / "tape.jsonl")]
    assert kinds.count("compiled") == 1
    assert kinds.index("compiled") < kinds.index("merged")


def test_a_merged_deltas_bytes_are_freed(make_engine, island):
    engine = make_engine(done=lambda: island.told(messages.Published))
    engine.run()
    with pytest.raises(KeyError):
        island.inbox.payload(DeltaKey("a", 1, 0, 1))


def test_a_log_that_cannot_be_written_ends_the_run_before_anything_is_told(
    make_engine, island, tmp_path
):
    class FullDisk(RecordLog):
        def append(self, record, payload=b""):
            if record["kind"] == "merged":
                raise OSError(28, "No space left on device")
            super().append(record, payload)

    log = FullDisk(tmp_path / "log")
    engine = make_engine(done=lambda: island.told(messages.Published), log=log)
    before = island_params(island)
    with pytest.raises(OSError, match="No space left on device"):
        engine.run()
    assert island.told(messages.TakeRequest)
    assert not island.told(messages.Published)
    assert island.store.fetch(0, Version(1, 0), None).version == Version(1, 0)
    assert all(map(np.array_equal, before, island_params(island)))
    tape = [r["kind"] for r in read_tape(tmp_path / "tape.jsonl")]
    assert "merged" not in tape


def test_a_merge_that_fails_ends_the_run(make_engine, island, store, monkeypatch):
    def fail(*arguments, **options):
        raise ArithmeticError("no merge")

    engine = make_engine(done=lambda: island.told(messages.Published))
    monkeypatch.setattr(store, "merge", fail)
    with pytest.raises(ArithmeticError, match="no merge"):
        engine.run()
    assert not island.told(messages.Published)


def test_a_merge_that_fails_is_not_forgotten_for_the_next_one(make_engine):
    engine = make_engine(done=lambda: False)
    for error in (ArithmeticError("no merge"), None):
        future = Future()
        future.set_exception(error) if error else future.set_result(None)
        engine._holder._succeeded(future)
    with pytest.raises(ArithmeticError, match="no merge"):
        engine.run()


def failing_step(kind):
    """Decisions with a bug in what they do about such an event."""
    step = decide.step

    def fail(config, state, event, now):
        said = event.message if isinstance(event, Said) else event
        if isinstance(said, kind) and event.island == "b":
            raise ArithmeticError("a bug")
        return step(config, state, event, now)

    return fail


@pytest.mark.parametrize("kind", [Hello, Report, DeltaArrived])
def test_an_event_of_a_peer_that_fails_ends_its_session_only(
    make_engine, island, tmp_path, monkeypatch, caplog, kind
):
    monkeypatch.setattr(decide, "step", failing_step(kind))
    engine = make_engine(
        done=lambda: island.refused and island.told(messages.Published)
    )
    arrived = DeltaArrived(island="b", incarnation=1, fragment=0, tick=1)
    for event in (hello("b"), report(1, island="b", session="b"), arrived):
        engine.post(event)
    engine.run()
    (session, error), *_ = island.refused
    assert (session, error.code) == ("b", "failed")
    assert "start the island again" in error.message
    assert "a bug" in caplog.text
    assert "Traceback" in caplog.text
    tape = list(read_tape(tmp_path / "tape.jsonl"))
    assert {r["island"] for r in tape if r["kind"] == "turned_away"} == {"b"}
    present = engine.state.islands
    if kind is not Hello:
        assert present["b"].status == "absent"
    assert ("b" in present) == (kind is not Hello)


def test_what_is_noted_of_a_peer_and_fails_ends_its_session_only(make_engine, island):
    engine = make_engine(done=lambda: len(island.refused) == 2)

    def fail():
        raise TypeError("no JSON")

    engine.post(hello("b"), fail)
    engine.post(None, fail, Disconnected(island="c", session="s"))
    engine.run()
    assert [session for session, _ in island.refused] == ["b", "s"]
    ours = make_engine(done=lambda: False)
    ours.post(None, fail)
    with pytest.raises(TypeError, match="no JSON"):
        ours.run()


def test_an_effect_that_fails_ends_the_run_whoever_caused_it(
    make_engine, island, monkeypatch
):
    engine = make_engine(done=lambda: False)

    def fail(*arguments):
        raise OverflowError("cannot be said")

    monkeypatch.setattr(island, "tell", fail)
    with pytest.raises(OverflowError, match="cannot be said"):
        engine.run()


def test_a_fault_strikes_after_the_merge_is_durable_and_before_it_is_told(
    make_engine, island, tmp_path, monkeypatch
):
    struck = []

    def strike(fault):
        kinds = [entry.record["kind"] for entry in read(tmp_path / "log", -1)]
        struck.append((fault.step, kinds[-1], len(island.told(messages.Published))))

    monkeypatch.setattr(Fault, "strike", strike)
    faults = [
        Fault(who="coordinator", incarnation=1, step=step, pause_s=None)
        for step in (1, 2)
    ]
    make_engine(done=lambda: island.told(messages.Published), faults=faults).run()
    assert struck == [(1, "merged", 0)]


def test_a_thread_that_was_held_up_does_not_take_islands_for_silent(
    make_engine, tmp_path, monkeypatch
):
    """As by a disk that hangs: reports of ten leases wait in the queue."""
    over, ahead = [], [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(clock, "time", time.time, raising=False)
    monkeypatch.setattr(lead_module, "time", clock)
    engine = make_engine(done=lambda: over)

    def held_up():
        for _ in range(20):
            ahead[0] += engine.config.lease_s / 2
            for name in ("c", "b"):
                engine.post(report(0, island=name, session=name))
        engine.post(None, lambda: over.append(True))

    for name in ("b", "c"):
        engine.post(hello(name))
        engine.post(report(0, island=name, session=name))
    engine.post(None, held_up)
    engine.run()
    tape = list(read_tape(tmp_path / "tape.jsonl"))
    assert [r["kind"] for r in tape].count("joined") == 3
    assert {r["island"] for r in tape if r["kind"] == "absent"} == {"a"}, "is silent"


def island_params(island):
    params = island.store.params()
    return [params["embed"], *params["blocks"].values()]
