"""The log gives back what was appended, and nothing else; which alerts are kept."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_jax.coordinator.journal import (
    ALERTS_EACH,
    ALERTS_KEPT,
    DurableError,
    Journal,
    Note,
    RecordLog,
    read,
)
from diloco_jax.faults import Faults
from diloco_jax.protocol import records


@pytest.fixture
def journal() -> Journal:
    nothing: Any = SimpleNamespace(append=lambda line: None)
    return Journal(nothing, nothing, faults=Faults(()), merges=0, slow_s=1.0)


def test_one_island_does_not_push_out_what_is_said_of_others(journal: Journal) -> None:
    journal.alert("the disk is full")
    journal.alert("b is quarantined", "b")
    for number in range(30):
        journal.alert(f"a failed {number}", "a")
    last = [f"a failed {number}" for number in range(30 - ALERTS_EACH, 30)]
    assert journal.alerts == ["the disk is full", "b is quarantined", *last]
    assert journal.alerts_raised == 32


def test_the_last_alerts_of_the_run_are_kept(journal: Journal) -> None:
    for number in range(200):
        journal.alert(str(number))
    assert journal.alerts == [str(n) for n in range(200 - ALERTS_KEPT, 200)]


def test_no_line_of_the_coordinators_has_a_kind_of_the_policys() -> None:
    theirs = {*records.Durable.__args__, *records.Noted.__args__}
    lines = (*theirs, *Note.__args__)
    assert len({line.__struct_config__.tag for line in lines}) == len(lines)


def filled(folder, segments=1):
    log = RecordLog(folder)
    for segment in range(segments):
        if segment:
            log.rotate()
        for index in range(3):
            log.append({"kind": "x", "n": 3 * segment + index, "pad": "x" * 80})
    log.close()
    return log


def numbers(folder, after=-1):
    return [record["n"] for record in read(folder, after)]


def test_records_come_back_in_order(tmp_path):
    filled(tmp_path, segments=2)
    assert numbers(tmp_path) == list(range(6))
    assert next(read(tmp_path, -1)) == {"kind": "x", "n": 0, "pad": "x" * 80}


def test_only_segments_after_the_snapshot_are_read_and_older_ones_deleted(tmp_path):
    log = filled(tmp_path, segments=3)
    assert numbers(tmp_path, after=1) == [6, 7, 8]
    log.forget(1)
    assert numbers(tmp_path) == [6, 7, 8]


@pytest.mark.parametrize("cut", [1, 50, 110, 117])
def test_an_unfinished_last_record_is_cut_off_and_appending_goes_on(
    tmp_path, cut, monkeypatch
):
    filled(tmp_path)
    synced = []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    path = tmp_path / "log-000000.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    assert numbers(tmp_path) == [0, 1]
    assert synced == [path.stat().st_size], "on disk, before a later segment exists"
    log = RecordLog(tmp_path)
    log.append({"n": 7})
    log.close()
    assert numbers(tmp_path) == [0, 1, 7]


def test_a_torn_last_record_of_full_length_is_cut_off(tmp_path):
    filled(tmp_path)
    path = tmp_path / "log-000000.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert numbers(tmp_path) == [0, 1]


@pytest.mark.parametrize("record", [0, 1])
def test_a_damaged_length_is_no_unfinished_record(tmp_path, record):
    filled(tmp_path)
    path = tmp_path / "log-000000.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 3 * record + 4 + 1] ^= 0x40  # longer by 16 KiB
    path.write_bytes(data)
    with pytest.raises(DurableError, match="whole ones follow its beginning"):
        numbers(tmp_path)
    assert path.read_bytes() == data


def test_a_text_that_looks_like_a_record_hides_none_after_it(tmp_path):
    log = RecordLog(tmp_path)
    log.append({"n": 0, "text": "dlc2" * 30})
    log.append({"n": 1})
    log.close()
    path = tmp_path / "log-000000.bin"
    data = bytearray(path.read_bytes())
    data[5] ^= 0x40  # The first record is longer by 16 KiB.
    path.write_bytes(data)
    with pytest.raises(DurableError, match="whole ones follow its beginning"):
        numbers(tmp_path)


def test_a_new_segment_stays_in_its_folder(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda fd: synced.append(os.fstat(fd).st_ino))
    log = RecordLog(tmp_path / "log")
    folders = [(tmp_path / name).stat().st_ino for name in ("log", ".")]
    assert synced == folders
    log.rotate()
    log.close()
    assert synced[:2] == folders
    assert synced[-1] == folders[0], "and then what says how long the first one was"


def test_damage_in_the_middle_is_an_error_that_names_the_place(tmp_path):
    filled(tmp_path)
    path = tmp_path / "log-000000.bin"
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with pytest.raises(DurableError, match=r"log-000000.bin, byte 0: checksum"):
        list(read(tmp_path, -1))


def test_a_short_segment_with_a_later_one_is_an_error(tmp_path):
    filled(tmp_path, segments=2)
    path = tmp_path / "log-000000.bin"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DurableError, match="later segments exist"):
        list(read(tmp_path, -1))


def test_a_full_disk_is_told_with_the_file(tmp_path):
    segment = tmp_path / "log-000000.bin"
    segment.symlink_to("/dev/full")
    log = RecordLog(tmp_path)
    with pytest.raises(OSError, match="No space left") as failed:
        log.append({"kind": "joined"})
    assert failed.value.filename == str(segment)
    log.close()
