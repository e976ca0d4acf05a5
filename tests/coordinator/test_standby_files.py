"""The standby's disk has at any moment what a crash of the primary would have left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from followed_support import Pair

from diloco_jax import storage
from diloco_jax.coordinator import log as durable
from diloco_jax.coordinator.holding.publishes import Publishes
from diloco_jax.coordinator.standby.feed import QUEUED_BYTES, StandbyFeed
from diloco_jax.errors import ConfigError
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol.values import Version
from diloco_jax.wire import follow
from diloco_jax.wire.errors import RemoteProtocolError
from diloco_jax.workdir import RunFacts


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()


def test_the_copy_and_what_follows_are_the_same_files(pair: Pair) -> None:
    pair.write(5)
    pair.publishes.write(0, Version(1, 1), b"p" * 3_000_000, final=False)
    pair.snapshot("state-000000.snapshot")
    (pair.there / "tape.jsonl").write_text("of an older copy\n")
    (pair.there / "node").write_text("b")
    pair.begin()
    pair.write(3)
    pair.publishes.write(1, Version(1, 1), b"q", final=False)
    pair.take()
    pair.write(40)
    pair.log.rotate()
    pair.write(2)
    pair.snapshot("00001/1-0.snapshot", b"t" * 2_500_000)
    pair.take()
    pair.take()
    assert pair.arrived == pair.out.number
    found = pair.files(pair.there)
    assert found.pop("node") == b"b"
    assert "tape.000005.jsonl" in found
    assert found == pair.files(pair.here)
    assert [line["n"] for line in read_tape(pair.there / "tape.jsonl")] == [
        line["n"] for line in durable.read(pair.there / "log", -1)
    ]


def test_any_beginning_of_the_stream_is_what_a_crash_would_leave(pair: Pair) -> None:
    pair.write(2)
    pair.begin()
    pair.take()
    for round_ in range(12):
        pair.publishes.write(0, Version(1, round_ + 1), b"p", final=False)
        pair.write(1)
        pair.take(most=2)
        log = [line["n"] for line in durable.read(pair.there / "log", -1)]
        assert log == sorted(log)
        # The publish comes before its record, and the record before its line.
        files = list((pair.there / "publishes").glob("*/*.publish"))
        assert len(files) >= len(log) - 2
        tape = [line["n"] for line in read_tape(pair.there / "tape.jsonl")]
        assert tape == log[: len(tape)]


def test_snapshots_wait_for_records_and_replace_what_they_hold(pair: Pair) -> None:
    pair.snapshot("00000/1-0.snapshot")
    pair.begin()
    pair.take()
    for number in range(1, 4):
        pair.publishes.write(0, Version(1, number), b"p", final=False)
    pair.snapshot("00000/1-2.snapshot", b"t" * 2_000_000)
    pair.write(1)
    kinds = [follow.from_primary(raw) for raw in itertools.islice(pair.messages, 7)]
    named = [getattr(message, "path", "") for message in kinds]
    assert named[:3] == [f"publishes/00000/1-{n}.publish" for n in (1, 2, 3)]
    assert named[3:5] == ["log/log-000000.bin", "tape.jsonl"]
    assert named[5:] == ["checkpoints/coordinator/00000/1-2.snapshot"] * 2
    for message in kinds:
        if isinstance(message, follow.FileChunk):
            pair.mirror.chunk(
                message.path, message.data, first=message.first, last=message.last
            )
    found = sorted(path.name for path in pair.there.rglob("1-*"))
    assert found == ["1-2.snapshot", "1-3.publish"]


def test_a_file_that_is_gone_is_in_the_copy_or_not_needed(pair: Pair) -> None:
    path = pair.snapshot("state-000000.snapshot", b"s" * 10)
    pair.begin()
    path.unlink()
    later = pair.snapshot("state-000001.snapshot")
    later.unlink()
    pair.take()
    assert (pair.there / "checkpoints/coordinator/state-000000.snapshot").exists()


def test_a_standby_that_takes_nothing_is_given_up(pair: Pair) -> None:
    pair.begin()
    line = b"x" * (QUEUED_BYTES // 4)
    for _ in range(5):
        pair.out.appended(pair.here / "tape.jsonl", line, sync=False)
    assert pair.lost == ["too much waits for it"]
    pair.out.appended(pair.here / "tape.jsonl", line, sync=False)
    assert pair.outgoing.error is not None


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "node", "keys/ca.key", "log/../node", "publishes/0/a", ""],
)
def test_no_other_file_is_written(pair: Pair, name: str) -> None:
    with pytest.raises(RemoteProtocolError, match="which no standby takes"):
        pair.mirror.append(name, b"", sync=False)
    with pytest.raises(RemoteProtocolError, match="which no standby takes"):
        pair.mirror.chunk(name, b"", first=True, last=True)


def test_a_second_copy_sends_what_is_not_the_same(pair: Pair) -> None:
    for number in (1, 2):
        pair.publishes.write(0, Version(1, number), b"p" * 100, final=False)
    pair.write(3)
    pair.begin()
    pair.take()
    # Prepared and never committed there, and computed anew.
    theirs = Publishes(pair.there / "publishes")
    theirs.write(0, Version(1, 3), b"x" * 100, final=False)
    theirs.write(0, Version(1, 4), b"x" * 100, final=False)
    pair.publishes.write(0, Version(1, 3), b"y" * 100, final=False)
    held = pair.mirror.sealed()
    assert len(held) == 4
    pair.outgoing.close()
    pair.outgoing = pair.out.prepare("r", held)
    pair.begin()
    first = follow.from_primary(next(pair.messages))
    assert isinstance(first, follow.CopyBegins)
    assert set(first.keep) == {f"publishes/00000/1-{n}.publish" for n in (1, 2)}
    pair.mirror.clear("r", first.keep)
    pair.take()
    assert pair.files(pair.there) == pair.files(pair.here)


def test_a_state_of_another_history_is_not_kept(pair: Pair) -> None:
    """Both nodes led, and each wrote snapshot 7 of the state by its own log."""
    name = "checkpoints/coordinator/7.snapshot"
    for folder, version in ((pair.there, 22), (pair.here, 24)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        storage.write_sealed(folder / name, {"state": {"version": version}}, [])
    pair.outgoing = pair.out.prepare("r", pair.mirror.sealed())
    pair.begin()
    pair.take()
    assert storage.read_sealed_header(pair.there / name) == {"state": {"version": 24}}


def test_the_files_of_another_run_stay(pair: Pair) -> None:
    RunFacts(run_id="other", begun_unix=0.0).write(pair.there)
    (pair.there / "tape.jsonl").write_text("theirs\n")
    with pytest.raises(ConfigError, match="holds run other, the primary's is r"):
        pair.mirror.clear("r")
    assert (pair.there / "tape.jsonl").read_text() == "theirs\n"


def test_the_middle_of_a_file_is_refused(pair: Pair) -> None:
    with pytest.raises(RemoteProtocolError, match="whose beginning did not come"):
        pair.mirror.chunk("tape.jsonl", b"", first=False, last=True)


def test_a_standby_that_left_before_its_copy_is_sent_nothing(pair: Pair) -> None:
    pair.out.end(pair.outgoing)
    pair.begin()
    pair.write(3)
    assert list(pair.messages) == []
    assert not pair.outgoing._first


def test_the_end_wakes_whoever_sends(pair: Pair) -> None:
    outgoing = StandbyFeed(pair.here, "r", 60.0, {})
    sent = threading.Thread(target=lambda: list(outgoing.messages()))
    sent.start()
    outgoing.end()
    sent.join(10.0)
    assert not sent.is_alive()


def test_messages_are_refused_by_their_field() -> None:
    raw = msgspec.msgpack.encode({"type": "Answered", "number": -2})
    with pytest.raises(msgspec.ValidationError, match="number"):
        follow.from_standby(raw)


def test_what_a_stream_left_unfinished_goes_with_the_next_copy(pair: Pair) -> None:
    """A full disk would stay full: that version is not sent again."""
    pair.begin()
    pair.take()
    pair.snapshot("00001/1-7.snapshot", b"t" * 2_500_000)
    pair.take(most=2)
    assert list(pair.there.rglob("*.tmp"))
    pair.mirror.clear("r")
    assert not list(pair.there.rglob("*.tmp"))
