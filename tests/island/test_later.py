"""Compilation beside the train loop."""

from __future__ import annotations

import threading

from diloco_jax.island.device.later import Later

PATIENCE_S = 60.0


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


class Refused(Program):
    """One that the compiler refuses."""

    def compile(self) -> None:
        raise ValueError("too large")


def test_all_are_compiled_beside_the_caller():
    may_end = threading.Event()
    programs = [Program(may_end), Program()]
    later = Later(programs)
    assert programs[0].begins.wait(PATIENCE_S)
    assert not programs[1].compiled.is_set()
    may_end.set()
    assert programs[1].compiled.wait(PATIENCE_S)
    later.close(PATIENCE_S)


def test_its_end_waits_for_one_program_at_most():
    may_end = threading.Event()
    programs = [Program(may_end), Program()]
    later = Later(programs)
    assert programs[0].begins.wait(PATIENCE_S)
    closing = threading.Thread(target=later.close, args=(PATIENCE_S,))
    closing.start()
    assert later._closed.wait(PATIENCE_S)
    may_end.set()
    closing.join(PATIENCE_S)
    assert programs[0].compiled.is_set()
    assert not programs[1].begins.is_set()


def test_its_end_waits_no_longer_than_it_is_told():
    may_end = threading.Event()
    programs = [Program(may_end), Program()]
    later = Later(programs)
    assert programs[0].begins.wait(PATIENCE_S)
    later.close(0.0)
    assert not programs[0].compiled.is_set()
    may_end.set()
    later.close(PATIENCE_S)
    assert not programs[1].begins.is_set()


def test_what_does_not_compile_is_said_and_ends_nothing(caplog):
    later = Later([Refused()])
    later._thread.join(PATIENCE_S)
    later.close(PATIENCE_S)
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert "does not compile: too large" in said.getMessage()
