"""Kept cycles on the disk: whole or not there, few, and read back as they were."""

import errno
import functools
import json
import threading

import numpy as np
import pytest

from diloco_jax import files, run_files
from diloco_jax.coordinator.holding import fragment_snapshots
from diloco_jax.coordinator.holding.fragment_snapshots import KeptCycles
from diloco_jax.protocol.holding import CycleKept, HolderTroubled, KeepFragment
from diloco_jax.protocol.messages import Version
from diloco_jax.wire.errors import ConnectionLost

SIZES = (6, 2)
WHOSE = {"run_id": "r", "plan": "p"}


class Told:
    """The words of a writer, and the moment of them."""

    def __init__(self):
        self.said = []
        self._heard = threading.Semaphore(0)

    def __call__(self, message):
        self.said.append(message)
        if isinstance(message, CycleKept):
            self._heard.release()

    def wait(self):
        assert self._heard.acquire(timeout=60)


def theta(fragment, cycle):
    return [np.full(SIZES[fragment], 10 * cycle + fragment, np.float32)]


def keep(cycles, cycle, told, fragments=(0, 1), done=lambda: None):
    for fragment in fragments:
        effect = KeepFragment(
            cycle=cycle,
            fragment=fragment,
            version=Version(1, cycle),
            merges=cycle,
            tokens=100 * (1 + fragment),
        )
        cycles.keep(effect, functools.partial(theta, fragment, cycle), told, done)


@pytest.fixture
def cycles(tmp_path):
    made = KeptCycles(tmp_path, 2, WHOSE, SIZES)
    yield made
    made.close(60.0)


def test_a_cycle_appears_when_all_of_it_is_on_disk(cycles, tmp_path):
    (tmp_path / run_files.SOURCE).mkdir()
    (tmp_path / run_files.SOURCE / "tokenizer.json").write_text("{}")
    told = Told()
    keep(cycles, 3, told, fragments=(1,))
    assert cycles.numbers() == []
    keep(cycles, 3, told, fragments=(0,))
    told.wait()
    assert told.said == [CycleKept(cycle=3)]
    assert cycles.numbers() == [3]
    names = ["00000.fragment", "00001.fragment", "cycle.json", "source/tokenizer.json"]
    assert cycles.files(3) == names
    folder = tmp_path / run_files.KEPT / "cycle-000003"
    for fragment in (0, 1):
        read = [np.empty(SIZES[fragment], np.float32)]
        header, _ = files.read_sealed(
            folder / fragment_snapshots.kept_name(fragment), read
        )
        np.testing.assert_array_equal(read[0], theta(fragment, 3)[0])
        assert header["version"] == [1, 3]
        assert (header["cycle"], header["run_id"]) == (3, "r")
    facts = json.loads((folder / "cycle.json").read_bytes())
    # Weighted by size: (6 * 100 + 2 * 200) / 8.
    assert (facts["merges"], facts["tokens"]) == (6, 125)


def test_a_fragment_that_does_not_come_is_no_fault_of_this_disk(cycles):
    told = Told()

    def breaks():
        raise ConnectionLost("the line broke")

    effect = KeepFragment(
        cycle=1, fragment=1, version=Version(1, 1), merges=1, tokens=8
    )
    cycles.keep(effect, breaks, told)
    told.wait()
    why = "fragment 1 did not come from its worker: the line broke"
    troubled = HolderTroubled(text=f"cycle 1 is not kept: {why}")
    assert told.said == [troubled, CycleKept(cycle=1)]


def test_few_are_kept_and_the_oldest_goes(cycles, tmp_path):
    told = Told()
    for cycle in (9, 10, 11):
        keep(cycles, cycle, told)
        told.wait()
    assert cycles.numbers() == [10, 11]
    assert len(list((tmp_path / run_files.KEPT).iterdir())) == 2


def test_one_that_cannot_be_written_is_given_up_and_told(cycles, tmp_path, monkeypatch):
    told, real = Told(), files.write_sealed
    calls = []

    def full(path, facts, arrays):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, facts, arrays)

    monkeypatch.setattr(files, "write_sealed", full)
    keep(cycles, 1, told)
    told.wait()
    trouble, kept = told.said
    assert kept == CycleKept(cycle=1)
    assert "cycle 1 is not kept" in trouble.text
    assert "No space left" in trouble.text
    assert list((tmp_path / run_files.KEPT).iterdir()) == []
    keep(cycles, 2, told)
    told.wait()
    assert cycles.numbers() == [2]


def test_a_fragment_is_let_go_in_a_cycle_that_was_given_up_too(cycles, monkeypatch):
    """Or its worker would hold it for ever."""
    monkeypatch.setattr(cycles, "_write_fragment", lambda *a: 1 / 0)
    told, let_go = Told(), threading.Semaphore(0)
    keep(cycles, 1, told, done=let_go.release)
    assert all(let_go.acquire(timeout=60) for _ in SIZES)


def test_what_a_crash_left_of_one_is_removed(tmp_path):
    torn = tmp_path / run_files.KEPT / "cycle-000004.tmp"
    torn.mkdir(parents=True)
    (torn / "00000.fragment").write_bytes(b"half")
    made = KeptCycles(tmp_path, 2, WHOSE, SIZES)
    made.close(60.0)
    assert not torn.exists()


def test_only_files_of_kept_cycles_are_handed_out(cycles, tmp_path):
    told = Told()
    keep(cycles, 1, told)
    told.wait()
    (tmp_path / "secret").write_text("s")
    assert cycles.path(1, "00000.fragment") is not None
    for cycle, name in ((2, "00000.fragment"), (1, "../../secret"), (1, "none")):
        assert cycles.path(cycle, name) is None


def test_a_disk_that_hangs_keeps_no_coordinator(tmp_path, monkeypatch):
    hangs, real = threading.Event(), files.write_sealed

    def slow(path, facts, arrays):
        assert hangs.wait(60)
        return real(path, facts, arrays)

    monkeypatch.setattr(files, "write_sealed", slow)
    made, told = KeptCycles(tmp_path, 2, WHOSE, SIZES), Told()
    keep(made, 1, told)
    made.close(0.01)
    assert told.said == []
    hangs.set()
    told.wait()
    assert made.numbers() == [1]
