"""Publishes on disk: prepared ones, committed ones, and those that are not needed."""

import errno
import shutil
from types import SimpleNamespace

import pytest

from diloco_jax import files
from diloco_jax.coordinator.holding import fragment_snapshots as module
from diloco_jax.coordinator.holding.fragment_snapshots import Publishes
from diloco_jax.coordinator.journal import DurableError
from diloco_jax.protocol.messages import Version


@pytest.fixture
def publishes(tmp_path):
    """Publishes of two fragments; the first has versions 1 to 4."""
    made = Publishes(tmp_path / "publishes")
    for number in range(1, 5):
        made.write(0, Version(1, number), bytes([number]) * 9, final=number == 4)
    return made


def numbers(publishes):
    return [version.number for version in publishes.versions(0)]


def test_a_publish_comes_back_with_its_digest(publishes):
    unused = {2: b"\xf0", 0: b"\0\1"}
    prepared = publishes.write(1, Version(2, 11), b"abc", final=False, unused=unused)
    assert prepared.digest == files.digest_of(b"abc")
    assert prepared.payload_bytes == 3
    payload, how = publishes.read(1, Version(2, 11), prepared.digest)
    assert (bytes(payload), how) == (b"abc", {"final": False, "unused": unused})
    assert publishes.read(0, Version(1, 4), None)[1] == {"final": True, "unused": {}}


def test_those_of_a_kept_snapshot_are_forgotten_and_uncommitted_ones_discarded(
    publishes,
):
    publishes.forget(0, Version(1, 1))
    assert publishes.discard({0: Version(1, 3), 1: Version()}) == 1
    assert numbers(publishes) == [2, 3]
    assert publishes.discard({0: Version(1, 3), 1: Version()}) == 0


def test_a_committed_one_that_is_missing_torn_or_another_is_damage(publishes, tmp_path):
    wanted = publishes.write(0, Version(1, 3), b"abc", final=False).digest
    publishes.write(0, Version(1, 3), b"abd", final=False)
    with pytest.raises(DurableError, match=rf"fragment 0, version \(1, 3\).*{wanted}"):
        publishes.read(0, Version(1, 3), wanted)
    (path,) = (tmp_path / "publishes").rglob("1-3.publish")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DurableError, match="was committed and cannot be read"):
        publishes.read(0, Version(1, 3), None)
    path.unlink()
    with pytest.raises(DurableError, match="is missing"):
        publishes.read(0, Version(1, 3), None)


def test_a_full_disk_is_told_with_folder_and_bytes_and_leaves_nothing(
    publishes, tmp_path, monkeypatch
):
    free = module.SPARED_BYTES + 99
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    publishes.write(0, Version(1, 5), bytes(99), final=False)
    with pytest.raises(
        OSError, match=f"{free + 1:,} bytes are needed and {free:,}"
    ) as e:
        publishes.write(0, Version(1, 6), bytes(100), final=False)
    assert e.value.errno == errno.ENOSPC
    assert e.value.filename == str(tmp_path / "publishes")
    assert numbers(publishes) == [1, 2, 3, 4, 5]


def test_what_a_crash_left_unfinished_is_removed(publishes, tmp_path):
    torn = tmp_path / "publishes" / "00000" / f"1-5.publish.abc{files.TEMPORARY}"
    torn.write_bytes(b"torn")
    assert numbers(Publishes(tmp_path / "publishes")) == [1, 2, 3, 4]
    assert not torn.exists()
