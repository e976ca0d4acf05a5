"""Ends of an island from outside: a notice of preemption, a loop that hangs, a machine
that is short of memory or disk; and traces of the steps that its loop makes."""

from __future__ import annotations

import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import coordinator_says as says
import jax
import jax.numpy as jnp
import pytest

from diloco_jax.config import IslandConfig
from diloco_jax.island import watches, world
from diloco_jax.island.device.mesh import require_accelerator
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.island.watches import (
    HangWatch,
    ShortageWatch,
    end_hanging,
    leave,
    trace_steps,
    watch_metadata,
)
from diloco_jax.machine import LITTLE_DISK_BYTES
from diloco_jax.process import LOOK_S
from diloco_jax.protocol.island.boundary import Ending
from diloco_jax.protocol.island.reporting import Status
from diloco_jax.protocol.messages import ProfileRequest
from diloco_jax.wire.addresses import reserve

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """However slow a server is, it is one."""
    monkeypatch.setattr(world, "METADATA_ANSWER_S", WAIT_S)


@pytest.fixture
def mailbox():
    return Mailbox()


def wait_for_end(mailbox):
    deadline = time.monotonic() + WAIT_S
    while mailbox.ending is None and time.monotonic() < deadline:
        mailbox.wait(deadline - time.monotonic())
        mailbox.decide()
    return mailbox.ending


def noticed(mailbox, notice_s=WAIT_S):
    """What is called with the source of a notice."""
    return lambda source: leave(
        mailbox, notice_s, Ending(1, f"preempted ({source})", "preempted")
    )


# ---- where it comes from ---------------------------------------------------------


def test_the_metadata_servers_notice_ends_the_loop(server, mailbox):
    watch = watch_metadata(noticed(mailbox))
    assert mailbox.ending is None
    server.preempted.set()
    text = "preempted (the metadata server)"
    assert wait_for_end(mailbox) == Ending(1, text, "preempted")
    watch.join(WAIT_S)
    assert not watch.is_alive()
    first, *others = server.paths
    assert first == "/computeMetadata/v1/instance/preempted"
    assert all("wait_for_change=true&last_etag=tag+1&" in path for path in others)


def test_a_server_that_is_away_for_a_moment_is_asked_again(
    server, mailbox, monkeypatch
):
    monkeypatch.setattr(watches, "AWAY_S", 0.01)
    server.answers = [(200, "FALSE"), (503, ""), (503, "")]
    server.preempted.set()
    watch_metadata(noticed(mailbox))
    assert wait_for_end(mailbox).exit_code == 1
    assert len(server.paths) == 4


@pytest.mark.parametrize("there", ["nobody", "one without it", "somebody else's"])
def test_where_there_is_no_such_server_nothing_happens(
    server, mailbox, monkeypatch, there
):
    server.preempted.set()
    if there == "nobody":
        address, beside = reserve("127.0.0.1:0")
        beside.close()
        monkeypatch.setenv("GCE_METADATA_HOST", address)
    server.answers = [(404, "")] * (there == "one without it")
    server.flavor = "" if there == "somebody else's" else "Google"
    watch = watch_metadata(noticed(mailbox))
    watch.join(WAIT_S)
    assert (watch.is_alive(), mailbox.ending) == (False, None)


def test_an_answer_that_is_no_http_is_none(monkeypatch):
    """It ended the watch, and with that all notice."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{port}")

        def answer():
            with listening.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(b"no HTTP\r\n\r\n")

        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(answer)
            with pytest.raises(OSError, match="its answer is none, or broke off"):
                world.ask_metadata("preempted")
            answered.result(WAIT_S)


# ---- what is done with its seconds ------------------------------------------------


@pytest.fixture
def training(mailbox):
    mailbox.post(Status(phase="training", steps=4))
    return mailbox


def test_the_loop_ends_once_the_island_is_let_go(training):
    says.may_leave(training)  # Of another time: nothing was asked for yet.
    noticed(training)("SIGTERM")
    deadline = time.monotonic() + WAIT_S
    while not (decision := training.decide()).leaving:
        assert time.monotonic() < deadline
        training.wait(0.05)
    assert (decision.stop, decision.ending) == (True, None)
    training.wait(0.2)
    assert training.ending is None
    says.may_leave(training)
    assert wait_for_end(training) == Ending(1, "preempted (SIGTERM)", "preempted")


def test_it_does_not_wait_longer_than_the_notice(training):
    noticed(training, 0.05)("SIGTERM")
    assert wait_for_end(training).exit_code == 1


def test_an_island_that_ends_meanwhile_keeps_its_reason(training):
    noticed(training)("SIGTERM")
    training.end(0, "finished")
    assert wait_for_end(training) == Ending(0, "finished")


def test_an_island_that_is_joining_leaves_at_once(mailbox):
    mailbox.post(Status(phase="compiling"))
    noticed(mailbox)("SIGTERM")
    assert wait_for_end(mailbox) == Ending(1, "preempted (SIGTERM)", "preempted")
    assert not mailbox.decide().leaving


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def hangs_after(watch: HangWatch, clock: Clock, most_s: float) -> float:
    """Seconds of looks until it says so; `most_s` if it does not."""
    began = clock.now
    while clock.now - began < most_s:
        clock.now += LOOK_S
        if watch.look():
            break
    return clock.now - began


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch_of(clock: Clock, budget_s: float) -> HangWatch:
    return HangWatch(budget_s, lambda text: None, clock)


@pytest.mark.parametrize("part", ["", "compiling"])
def test_without_a_budget_nothing_hangs(clock, part):
    with watch_of(clock, 0.0) as watch:
        if part:
            watch.begin(part, 1.0, "placement.compile_budget_s")
        assert hangs_after(watch, clock, 5000.0) == 5000.0


def test_a_touch_begins_the_budget_anew(clock):
    watch = watch_of(clock, 30.0)
    for _ in range(20):
        assert hangs_after(watch, clock, 20.0) == 20.0
        watch.touch()
    assert hangs_after(watch, clock, 100.0) == pytest.approx(30.0, abs=2 * LOOK_S)


def test_a_part_of_the_start_may_take_what_its_setting_says_and_the_budget(clock):
    watch, told = watch_of(clock, 30.0), []
    watch.hangs = told.append
    with watch:
        watch.begin("connecting", 10.0, "placement.outage_budget_s")
        assert hangs_after(watch, clock, 39.0) == 39.0
        watch.begin("compiling", 200.0, "placement.compile_budget_s")
        assert hangs_after(watch, clock, 500.0) == pytest.approx(230.0, abs=2 * LOOK_S)
        watch._tell()
    assert "compiling may take 200 s (placement.compile_budget_s), and" in told[0]
    assert "placement.hang_budget_s = 30" in told[0]


def test_the_loop_has_its_own_budget_after_the_start(clock):
    watch = watch_of(clock, 30.0)

    class Loop:
        touch = None

        def run(self):
            return hangs_after(watch, clock, 100.0)

    with watch:
        watch.begin("restoring", 1000.0, "placement.outage_budget_s")
        hangs_after(watch, clock, 900.0)
        assert watch.run(Loop()) == pytest.approx(30.0, abs=2 * LOOK_S)
    assert watch.words(31).startswith("hangs: no step and no boundary for 31 s; place")


@pytest.mark.parametrize("blocks", [False, True])
def test_a_hanging_process_says_goodbye_if_it_can_and_ends(monkeypatch, blocks):
    ended, said, never = [], [], threading.Event()
    monkeypatch.setattr(watches, "leave_at_once", ended.append)

    def stop(ending):
        said.append(ending)
        if blocks:
            never.wait(WAIT_S)

    ending = Ending(1, "hangs")
    end_hanging(stop, ending, 0.05 if blocks else WAIT_S)
    never.set()
    assert (said, ended) == ([ending], [1])


def test_a_host_that_lost_its_accelerator_is_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    island = IslandConfig(topology="v6e:2x2")
    with pytest.raises(RuntimeError, match=r"v6e:2x2, .* has lost its accelerator"):
        require_accelerator(island, {})
    require_accelerator(island, {"JAX_PLATFORMS": "cpu"})
    require_accelerator(IslandConfig(), {})
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    require_accelerator(island, {})


class Machine:
    """A machine that has left what a test says."""

    def __init__(self, monkeypatch, folder) -> None:
        self.memory, self.free = (50 << 30, 100 << 30), 100 * LITTLE_DISK_BYTES
        monkeypatch.setattr(watches.machine, "left_bytes", lambda: self.memory)
        usage = SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=self.free))
        monkeypatch.setattr(watches, "shutil", usage)
        self.mailbox = Mailbox()
        self.mailbox.post(Status(phase="training"))
        self.watch = ShortageWatch(folder / "not" / "made", self.mailbox.tell_short)

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


def test_what_a_machine_is_short_of_is_told_and_in_the_log_once(machine, caplog):
    enough, little = machine.memory, (1 << 30, 100 << 30)
    assert machine.short() == ()
    for _ in range(2):
        machine.memory = little
        assert [machine.short() for _ in range(3)] == [("memory",)] * 3
        machine.memory = enough
        assert machine.short() == ()
    machine.free = LITTLE_DISK_BYTES - 1
    assert machine.short() == ("disk",)
    assert "1074 MB are free in " in caplog.text
    machine.memory = little
    assert machine.short() == ("disk", "memory")
    machine.free = LITTLE_DISK_BYTES
    assert machine.short() == ("memory",)
    assert caplog.text.count("GB of memory are left") == 3


def test_what_another_host_is_short_of_counts_until_it_says_otherwise(machine):
    nothing, _ = machine.mailbox.counted()
    machine.mailbox.count_of(1, nothing, ("memory",))
    machine.mailbox.count_of(2, nothing, ())
    machine.free = 0
    assert machine.short() == ("disk", "memory")
    machine.mailbox.count_of(1, nothing, ())
    assert machine.short() == ("disk",)


def test_it_looks_on_a_thread_until_the_block_ends_though_a_look_fails(
    machine, monkeypatch, caplog
):
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
            watch._thread.join(0.001)
            told = machine.mailbox.report(0)[0].measures.short
            if told or not watch._thread.is_alive():
                break
    watch._thread.join(WAIT_S)
    assert not watch._thread.is_alive()
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


# ---- traces ------------------------------------------------------------------------


class Island:
    """A loop's mailbox, and what its profiler says in the log."""

    def __init__(self, folder, caplog) -> None:
        caplog.set_level(logging.INFO)
        self.mailbox, self._caplog, self._folder = Mailbox(), caplog, folder

    def trace(self, steps, within_s=WAIT_S) -> threading.Thread:
        asked = ProfileRequest(steps=steps, within_s=within_s)
        return trace_steps(self.mailbox, "a", self._folder, asked)

    def said(self) -> list[str]:
        return [m for m in self._caplog.messages if "trace of" in m]

    def steps_until_said(self, start=40) -> str:
        """Make steps until the log says what became of the trace; return that."""
        twice = jax.jit(lambda x: x @ x)
        for step in range(start, start + 100_000):
            self.mailbox.post(Status(phase="training", steps=step))
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                twice(jnp.ones((8, 8))).block_until_ready()
            if said := self.said():
                return said[0]
        raise AssertionError("nothing was said")


def test_whole_steps_are_in_the_trace_and_the_log_says_where_it_is(tmp_path, caplog):
    island = Island(tmp_path / "profiles", caplog)
    island.mailbox.post(Status(phase="training", steps=40))
    island.trace(2)
    said = island.steps_until_said()
    (folder,) = (tmp_path / "profiles").iterdir()
    assert folder.name.startswith("a-4")
    assert f"the trace of 2 steps is in {folder};" in said
    (file,) = folder.rglob("*.xplane.pb")
    found = jax.profiler.ProfileData.from_file(str(file))
    names = {e.name for p in found.planes for line in p.lines for e in line.events}
    assert any(name.startswith("train") for name in names), sorted(names)[:40]


def test_why_there_is_no_trace_is_said(tmp_path, caplog):
    island = Island(tmp_path, caplog)
    island.trace(10**6, within_s=0.2)
    assert "has to come to step" in island.steps_until_said()


def test_a_folder_that_cannot_be_made_is_said(tmp_path, caplog):
    (tmp_path / "profiles").write_text("a file in its place")
    island = Island(tmp_path / "profiles", caplog)
    island.trace(2)
    assert island.steps_until_said().startswith("no trace of 2 steps: ")


def test_an_island_that_ends_says_so(tmp_path, caplog):
    island = Island(tmp_path, caplog)
    tracing = island.trace(2)
    island.mailbox.end(0, "asked to end")
    tracing.join(WAIT_S)
    assert "the island ends" in island.said()[0]
