"""A machine that is short of memory or disk is in the log once, and in the reports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from diloco_jax.island import watches
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.island.watches import ShortageWatch
from diloco_jax.machine import LITTLE_DISK_BYTES
from diloco_jax.protocol.island.reporting import Status


class Machine:
    """A machine that has left what a test says."""

    def __init__(self, monkeypatch, folder) -> None:
        self.memory, self.free = (50 << 30, 100 << 30), 100 * LITTLE_DISK_BYTES
        monkeypatch.setattr(watches.machine, "left_bytes", lambda: self.memory)
        usage = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=self.free))
        monkeypatch.setattr(watches, "shutil", usage)
        self.mailbox = Mailbox()
        self.mailbox.post(Status(phase="training"))
        self.watch = ShortageWatch((folder / "not" / "made",), self.mailbox.tell_short)

    def short(self) -> tuple[str, ...]:
        """Return what the next report says."""
        self.watch.look()
        return self.mailbox.report(0)[0].measures.short


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Machine:
    return Machine(monkeypatch, tmp_path)


@pytest.fixture
def given(monkeypatch) -> list[int]:
    """One element for each time that memory was given back; no peak is known."""
    given: list[int] = []
    monkeypatch.setattr(watches.machine, "give_memory_back", lambda: given.append(1))
    monkeypatch.setattr(watches.machine, "peak_bytes", lambda: 0)
    return given


def test_little_memory_is_in_the_log_once(machine, caplog):
    assert machine.short() == ()
    machine.memory = (1 << 30, 100 << 30)
    assert [machine.short() for _ in range(3)] == [("memory",)] * 3
    assert caplog.text.count("GB of memory are left") == 1
    machine.memory = (50 << 30, 100 << 30)
    assert machine.short() == ()
    machine.memory = (1 << 30, 100 << 30)
    machine.short()
    assert caplog.text.count("GB of memory are left") == 2


def test_a_disk_that_is_nearly_full_is_named(machine, caplog):
    machine.free = LITTLE_DISK_BYTES - 1
    assert machine.short() == ("disk",)
    assert "1074 MB are free in " in caplog.text
    machine.memory = (1 << 30, 100 << 30)
    assert machine.short() == ("disk", "memory")
    machine.free = LITTLE_DISK_BYTES
    assert machine.short() == ("memory",)


def test_what_another_host_is_short_of_counts_until_it_says_otherwise(machine):
    nothing = machine.mailbox.traffic()
    machine.mailbox.count_of(1, nothing, ("memory",))
    machine.mailbox.count_of(2, nothing, ())
    machine.free = 0
    assert machine.short() == ("disk", "memory")
    machine.mailbox.count_of(1, nothing, ())
    assert machine.short() == ("disk",)


def test_it_looks_on_a_thread_until_the_block_ends(machine, monkeypatch):
    monkeypatch.setattr(watches, "LOOK_S", 0.001)
    machine.free = 0
    with machine.watch as watch:
        for _ in range(10_000):
            if machine.mailbox.report(0)[0].measures.short:
                break
            watch._thread.join(0.001)
    watch._thread.join(30.0)
    assert not watch._thread.is_alive()
    assert machine.mailbox.report(0)[0].measures.short == ("disk",)


def test_a_look_that_fails_is_not_the_last(machine, monkeypatch, caplog):
    monkeypatch.setattr(watches, "LOOK_S", 0.001)
    looks, left = iter(range(10_000)), machine.memory

    def left_bytes():
        if next(looks) < 3:
            raise OSError("stale file handle")
        return left

    monkeypatch.setattr(watches.machine, "left_bytes", left_bytes)
    machine.free = 0
    with machine.watch as watch:
        for _ in range(10_000):
            if (
                machine.mailbox.report(0)[0].measures.short
                or not watch._thread.is_alive()
            ):
                break
            watch._thread.join(0.001)
    assert machine.mailbox.report(0)[0].measures.short == ("disk",)
    assert caplog.text.count("stale file handle") == 1


def test_freed_memory_is_given_back_again_and_again(machine, given):
    for _ in range(3 * watches.GIVE_BACK_LOOKS):
        machine.short()
    assert len(given) == 3


def test_freed_memory_is_given_back_at_once_while_the_peak_grows(
    machine, given, monkeypatch
):
    counts = []
    for peak in (1000, 1003, 1006, 1006, 1010, 1020, 1020):
        monkeypatch.setattr(watches.machine, "peak_bytes", lambda peak=peak: peak)
        machine.short()
        counts.append(len(given))
    assert counts == [1, 1, 2, 2, 2, 3, 3], "at the first look, 1006 and 1020"
