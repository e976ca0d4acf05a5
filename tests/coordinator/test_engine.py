"""The engine carries out effects: durable first, visible afterwards."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
from engine_support import hello, report

from diloco_jax.coordinator import journal as durable
from diloco_jax.coordinator import lead as lead_module
from diloco_jax.coordinator.holding.fragment_snapshots import Publishes
from diloco_jax.coordinator.journal import RecordLog, read
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol import messages
from diloco_jax.protocol.coordinator import decide
from diloco_jax.protocol.coordinator.state import Disconnected, Outdated, Said
from diloco_jax.protocol.holding import DeltaArrived
from diloco_jax.protocol.messages import Hello, Report, Version
from diloco_jax.wire.errors import Refused


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
    assert published.version == Version(1, 1)
    assert published.verdict.verdict == "merged"
    assert held[-1] == "merged"
    assert synced[-1] == len(island.seen) - 1  # between the message before and this
    *_, merged = read(tmp_path / "log", -1)
    source = island.store.fetch(0, Version(1, 1), Version(1, 0))
    publishes = Publishes(tmp_path / "publishes")
    payload, _ = publishes.read(0, Version(1, 1), merged["digest"])
    assert bytes(payload) == b"".join(bytes(b) for b in source.buffers)
    assert len(payload) == merged["payload_bytes"]
    on_tape = [r for r in read_tape(tmp_path / "tape.jsonl") if r["kind"] == "merged"]
    assert [r["digest"] for r in on_tape] == [merged["digest"]]


def test_a_slow_log_is_told(make_engine, island):
    engine = make_engine(done=lambda: island.told(messages.Published), slow_s=0.0)
    engine.run()
    (alert,) = engine.journal.alerts
    assert "the record log's disk is slow" in alert


def test_a_log_that_cannot_be_written_ends_the_run_before_anything_is_told(
    make_engine, island, tmp_path
):
    class FullDisk(RecordLog):
        def append(self, record):
            if record["kind"] == "merged":
                raise OSError(28, "No space left on device")
            super().append(record)

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


def test_a_coordinator_whose_state_is_old_ends_as_one_that_is_refused(make_engine):
    engine = make_engine(done=lambda: True)
    with pytest.raises(Refused, match="an old one") as caught:
        engine.engine.carry_out(Outdated(text="its state is an old one"))
    assert caught.value.code == "outdated"
