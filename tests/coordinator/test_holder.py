"""Merges are computed, prepared and committed; what cannot be written waits."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
from engine_support import WAIT_S, hello, report

from diloco_jax.coordinator.holding import fragment_snapshots, holder
from diloco_jax.coordinator.holding.fragment_snapshots import Publishes
from diloco_jax.coordinator.journal import read
from diloco_jax.core.tiles import digest_arrays, sha256_arrays
from diloco_jax.faults import Fault
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol import messages
from diloco_jax.protocol.messages import DeltaKey


@pytest.mark.parametrize("of_worker", [False, True])
def test_the_digest_of_the_parameters_follows_on_the_tape(
    make_engine, island, tmp_path, of_worker
):
    """That of an anchor, which a peer has, too, if a worker may lose the fragment."""

    def noted():
        tape = read_tape(tmp_path / "tape.jsonl")
        return [record for record in tape if record["kind"] == "digested"]

    engine = make_engine(done=noted)
    if of_worker:
        engine._holder._holder._kept = None
    engine.run()
    (found,), arrays = noted(), island.store.arrays(0)
    assert (found["fragment"], found["version"]) == (0, [1, 1])
    assert found["digest"] == digest_arrays(arrays["theta"])
    assert found["digest"].startswith("xxh3-128:"), "the tape names its kind"
    anchor = sha256_arrays(arrays["anchor"]) if of_worker else None
    assert found.get("anchor") == anchor


def test_digests_that_come_after_the_last_decision_are_on_the_tape(
    make_engine, island, tmp_path, monkeypatch
):
    give_memory_back = holder.give_memory_back

    def late():
        deadline = time.monotonic() + WAIT_S
        while not engine._ended and time.monotonic() < deadline:
            time.sleep(0.01)
        return give_memory_back()

    monkeypatch.setattr(holder, "give_memory_back", late)
    engine = make_engine(done=lambda: island.told(messages.Published))
    engine.run()
    kinds = [record["kind"] for record in read_tape(tmp_path / "tape.jsonl")]
    assert kinds.count("digested") == kinds.count("merged") == 1


def test_a_merge_is_ordered_prepared_and_committed_in_messages_alone(
    make_engine, island
):
    """They pass as bytes: nothing else of the lead's reaches the holder."""

    def done():
        return "MergeDigested" in passed

    engine = make_engine(done=done)
    passed = engine._holder.passed
    engine.run()
    order = [name for name in passed if name.startswith(("Merge", "Commit"))]
    made = ["Merge", "MergePrepared", "Commit", "MergeMeasured", "MergeDigested"]
    assert [name for name in order if name != "MergesCompiled"] == made
    assert island.told(messages.Published)


def test_what_a_holder_says_while_it_is_told_does_not_wait_for_the_lead(
    make_engine, island, tmp_path, monkeypatch
):
    """The queue may be full, and only the lead's thread empties it."""
    engine = make_engine(done=lambda: island.told(messages.Published))
    hold, post = engine._holder.hold, engine.post

    def held(message):
        def from_elsewhere(*arguments):
            assert threading.current_thread() is not lead
            post(*arguments)

        lead = threading.current_thread()
        with monkeypatch.context() as now:
            now.setattr(engine, "post", from_elsewhere)
            hold(message)

    engine._holder.hold = held
    engine.run()
    kinds = [record["kind"] for record in read_tape(tmp_path / "tape.jsonl")]
    assert kinds[kinds.index("merged") + 1] == "measured"


def test_a_publish_that_cannot_be_written_keeps_its_merge_and_nothing_else_waits(
    make_engine, island, tmp_path, monkeypatch
):
    """The disk is full until the alert is there and another island is let in."""
    monkeypatch.setattr(fragment_snapshots, "WRITE_AGAIN_S", 0.01)
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=7))
    steps = []

    def done():
        if not steps and engine.journal.alerts:
            steps.append("full")
            assert not island.told(messages.Published)
            assert island.inbox.payload(DeltaKey("a", 1, 0, 1)) is not None
            engine.post(hello("b"))
        elif steps == ["full"] and len(island.told(messages.Welcome)) == 2:
            steps.append("let in")
            monkeypatch.setattr(shutil, "disk_usage", usage)
        return island.told(messages.Published)

    engine = make_engine(done=done)
    engine.run()
    assert steps == ["full", "let in"]
    (alert,) = engine.journal.alerts
    assert f"cannot be written to {tmp_path}/publishes" in alert
    assert "bytes are needed and 7 are free" in alert


def test_a_publish_that_cannot_be_written_in_time_ends_the_coordinator_by_name(
    make_engine, island, tmp_path, monkeypatch
):
    """Whatever is wrong with the disk. People were told before."""
    monkeypatch.setattr(fragment_snapshots, "WRITE_AGAIN_S", 0.01)
    now = [0.0]
    monkeypatch.setattr(holder, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def write(*arguments, **options):
        now[0] += 0.02
        raise OSError(errno.EIO, "Input/output error", str(tmp_path / "publishes"))

    monkeypatch.setattr(Publishes, "write", write)
    engine = make_engine(done=lambda: False, write_within_s=0.05)
    with pytest.raises(OSError, match="the publish of fragment 0 could not be") as told:
        engine.run()
    assert "(Input/output error), of 0.05 (4 * placement.outage" in str(told.value)
    assert told.value.filename == str(tmp_path / "publishes")
    assert not island.told(messages.Published)
    (alert,) = engine.journal.alerts
    assert "within 0.05 s (4 * placement.outage_budget_s), and it goes on" in alert


def test_a_merge_waits_for_the_compiler_and_frees_its_deltas(
    make_engine, island, tmp_path
):
    """The tape tells how long it waited."""
    make_engine(done=lambda: island.told(messages.Published)).run()
    kinds = [record["kind"] for record in read_tape(tmp_path / "tape.jsonl")]
    assert kinds.count("compiled") == 1
    assert kinds.index("compiled") < kinds.index("merged")
    with pytest.raises(KeyError):
        island.inbox.payload(DeltaKey("a", 1, 0, 1))


def test_a_merge_that_fails_ends_the_run(make_engine, island, store, monkeypatch):
    def fail(*arguments, **options):
        raise ArithmeticError("no merge")

    engine = make_engine(done=lambda: island.told(messages.Published))
    monkeypatch.setattr(store, "merge", fail)
    with pytest.raises(ArithmeticError, match="no merge"):
        engine.run()
    assert not island.told(messages.Published)


def test_faults_strike_between_prepared_and_committed_and_before_it_is_told(
    make_engine, island, tmp_path, monkeypatch
):
    """Between from the second merge of a life on: a life that goes on after the fault
    begins with the same merge, and must not end again."""
    struck = []

    def strike(fault):
        merges = [r["kind"] for r in read(tmp_path / "log", -1)].count("merged")
        publishes = Publishes(tmp_path / "publishes")
        # Both fragments may be prepared before the first of them is committed.
        assert sum(len(publishes.versions(f)) for f in (0, 1)) >= fault.step
        told = len(island.told(messages.Published))
        struck.append((fault.prepared, fault.step, merges, told))

    monkeypatch.setattr(Fault, "strike", strike)
    faults = [
        Fault(
            who="coordinator",
            incarnation=1,
            step=step,
            action="kill-prepared" if prepared else "kill",
        )
        for step in (1, 2)
        for prepared in (True, False)
    ]
    engine = make_engine(
        done=lambda: len(island.told(messages.Published)) == 2, faults=faults
    )
    engine.post(report(4))
    engine.run()
    assert struck == [(False, 1, 1, 0), (True, 2, 1, 1), (False, 2, 2, 1)]
