"""A failed compilation ends an island for good, and names the flags in force; what is
compiled beside the train loop ends nothing."""

from __future__ import annotations

import contextlib
import functools
import threading
from types import SimpleNamespace

import jax
import pytest

from diloco_jax import before_jax
from diloco_jax.config import Config, ConfigError
from diloco_jax.config.placement import Deadlines
from diloco_jax.island import main
from diloco_jax.island.device.build import (
    Later,
    NotCompiledError,
    compile_ahead,
    compile_programs,
)
from diloco_jax.island.host import Host
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.island.main import TrainingHost
from diloco_jax.island.world import ALONE, Hosts
from diloco_jax.wire.errors import ConnectionLost


@pytest.fixture
def tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


class Refused:
    """Programs that the compiler does not take."""

    def __init__(self, said="FAILED_PRECONDITION: Continuation fusion"):
        self.said = said

    def lower_all(self, *args, **options):
        return [self]

    def programs(self):
        return 1

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.said)


@pytest.mark.parametrize(
    ("said", "passes"),
    [
        ("UNAVAILABLE: TPU initialization failed", True),
        ("DEADLINE_EXCEEDED: no answer", True),
        ("ABORTED: a peer has left", True),
        ("CANCELLED: a peer has left", True),
        ("RESOURCE_EXHAUSTED: out of HBM", False),
        ("INVALID_ARGUMENT: as it is UNAVAILABLE here", False),
        ("INTERNAL: Mosaic failed", False),
    ],
)
def test_what_may_pass_is_no_fault_of_the_config(tpu, said, passes):
    with pytest.raises(NotCompiledError if passes else ConfigError, match=said):
        compile_ahead(Refused(said), Refused(said), 8)


def test_what_fails_without_a_tpu_may_be_the_machines():
    programs = Refused("RESOURCE_EXHAUSTED: out of memory")
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"):
        compile_ahead(programs, programs, 8)


def test_a_refusal_names_the_flags_in_force(tpu, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_mine=1")
    monkeypatch.setattr(before_jax, "libtpu_version", lambda: "0.0.50.1")
    with pytest.raises(ConfigError, match="Continuation fusion") as refused:
        compile_ahead(Refused(), Refused(), 8)
    assert "libtpu 0.0.50.1, LIBTPU_INIT_ARGS = '--xla_mine=1'" in str(refused.value)


@pytest.mark.parametrize(
    ("platform", "hosts", "ahead"),
    [("tpu", ALONE, True), ("cpu", ALONE, False), ("cpu", Hosts(None, 0, 2), True)],
)
def test_tpus_and_several_hosts_run_nothing_before_all_is_compiled(
    monkeypatch, platform, hosts, ahead
):
    class LowersError(Exception):
        pass

    def lower_all(*, seldom=True):
        assert seldom == ahead
        raise LowersError

    here = SimpleNamespace(
        hosts=hosts,
        meet_compiled=lambda: None,
        _trainer=SimpleNamespace(lower_all=lambda length: []),
        exchange=SimpleNamespace(lower_all=lower_all, programs=lambda **which: 7),
        programs_left=None,
        _zeros={},
        _watched=None,
        config=Config(),
    )
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    with pytest.raises(LowersError):
        TrainingHost.compile(here)


PATIENCE_S = 60.0


@pytest.mark.parametrize("hosts", [ALONE, Hosts(None, 0, 2), Hosts(None, 1, 2)])
def test_a_host_without_others_compiles_no_other_program_once_asked_to_end(hosts):
    class Ends(Program):
        def compile(self):
            super().compile()
            mailbox.end(0, "asked to end by SIGTERM", "stopped")

    mailbox, programs = Mailbox(), [Ends(), Program()]
    host = SimpleNamespace(
        mailbox=mailbox,
        hosts=hosts,
        awaits_last=False,
        _tell_left=lambda **left: None,
    )
    left = functools.partial(Host.programs_left, host)
    with (
        contextlib.nullcontext()
        if hosts.others
        else pytest.raises(ConnectionLost, match="while it compiles: asked to end by")
    ):
        compile_programs(programs, 2, left)
    assert [p.compiled.is_set() for p in programs] == [True, bool(hosts.others)]


@pytest.mark.parametrize(
    ("starts", "asked", "hosts", "ends"),
    [
        (True, True, ALONE, True),
        (True, False, ALONE, False),
        (False, True, ALONE, False),
        (True, True, Hosts(None, 0, 2), False),
    ],
)
def test_one_program_of_minutes_does_not_keep_a_host_that_is_to_end(
    monkeypatch, starts, asked, hosts, ends
):
    mailbox, ended = Mailbox(), []
    if asked:
        mailbox.end(1, "preempted (SIGTERM)", "preempted")
    monkeypatch.setattr(main, "end_hanging", lambda *given: ended.append(given))
    monkeypatch.setattr(main.time, "sleep", lambda seconds: None)
    host = SimpleNamespace(
        starts=starts,
        stop="stop",
        mailbox=mailbox,
        hosts=hosts,
        deadlines=Deadlines(8.0),
    )
    main.end_starting(host)
    assert ended == [("stop", mailbox.ending, 2.0)] * ends


class Program:
    """A lowered program whose compilation waits until it may end."""

    def __init__(self, may_end: threading.Event | None = None) -> None:
        self.begins, self.compiled = threading.Event(), threading.Event()
        self._may_end = may_end

    def compile(self) -> None:
        self.begins.set()
        if self._may_end is not None:
            assert self._may_end.wait(PATIENCE_S)
        self.compiled.set()


def begun():
    """Two programs, of which the first is being compiled; what compiles them; the event
    that lets the first one end."""
    may_end = threading.Event()
    programs = [Program(may_end), Program()]
    later = Later(programs)
    assert programs[0].begins.wait(PATIENCE_S)
    return programs, later, may_end


def test_all_are_compiled_beside_the_caller():
    programs, later, may_end = begun()
    assert not programs[1].compiled.is_set()
    may_end.set()
    assert programs[1].compiled.wait(PATIENCE_S)
    later.close(PATIENCE_S)


def test_its_end_waits_for_one_program_and_no_longer_than_it_is_told():
    programs, later, may_end = begun()
    later.close(0.0)
    assert not programs[0].compiled.is_set()
    may_end.set()
    later.close(PATIENCE_S)
    assert programs[0].compiled.is_set()
    assert not programs[1].begins.is_set()


def test_what_does_not_compile_is_said_and_ends_nothing(caplog):
    later = Later([Refused("too large")])
    later._thread.join(PATIENCE_S)
    later.close(PATIENCE_S)
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert "does not compile: too large" in said.getMessage()
