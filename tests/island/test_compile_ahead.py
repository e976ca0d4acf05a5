"""A failed compilation ends an island for good, and names the flags in force."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace

import jax
import pytest

from diloco_jax import before_jax
from diloco_jax.config import ConfigError
from diloco_jax.config.placement import Deadlines
from diloco_jax.island import main
from diloco_jax.island.device.build import (
    NotCompiledError,
    compile_ahead,
    compile_programs,
)
from diloco_jax.island.host import Host
from diloco_jax.island.mailbox import Mailbox
from diloco_jax.island.world import ALONE, Hosts
from diloco_jax.wire.errors import ConnectionLost


@pytest.fixture
def tpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")


class Refused:
    """Programs that the compiler does not take."""

    def __init__(self, said="FAILED_PRECONDITION: Continuation fusion"):
        self.said = said

    def lower_all(self, *args):
        return [self]

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


@pytest.mark.parametrize("hosts", [ALONE, Hosts(None, 0, 2), Hosts(None, 1, 2)])
def test_a_host_without_others_compiles_no_other_program_once_asked_to_end(hosts):
    class Program:
        def compile(self):
            compiled.append(self)
            mailbox.end(0, "asked to end by SIGTERM", "stopped")

    mailbox, programs, compiled = Mailbox(), [Program(), Program()], []
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
        compile_programs(programs, left)
    assert compiled == programs[: 1 + bool(hosts.others)]


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
