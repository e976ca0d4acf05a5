"""The end of a process that repeats islands."""

from multiprocessing import Pipe

import pytest

from diloco_jax.config import RunConfig
from diloco_jax.simulation.replay import worker
from diloco_jax.simulation.replay.pipe import Setup
from diloco_jax.simulation.replay.recording import Who

SETUP = Setup(run=RunConfig())
JUDGE = (Who("a", 1), "judge", 0, "settled")


@pytest.fixture
def pipe(monkeypatch):
    """(its end, ours), of a process that is like this one."""
    monkeypatch.setattr(worker.compilation, "use_cache", lambda folder: None)
    theirs, ours = Pipe()
    yield theirs, ours
    theirs.close()
    ours.close()


@pytest.mark.parametrize("commands", [(), (SETUP,)])
def test_a_commander_that_is_gone_is_the_end_without_a_word(pipe, commands):
    theirs, ours = pipe
    for command in commands:
        ours.send(command)
    ours.close()
    worker.serve(theirs)


@pytest.mark.parametrize("reads", [False, True])
def test_a_commander_that_does_not_wait_for_the_answer(pipe, monkeypatch, reads):
    theirs, ours = pipe

    def carry_out(copies, *call):
        if reads:
            ours.recv()
        ours.close()
        return b"a delta"

    monkeypatch.setattr(worker.Copies, "carry_out", carry_out)
    for command in (SETUP, JUDGE):
        ours.send(command)
    worker.serve(theirs)


def test_an_interrupt_is_the_end_without_a_word(pipe, monkeypatch):
    def interrupted(copies, *call):
        raise KeyboardInterrupt

    theirs, ours = pipe
    monkeypatch.setattr(worker.Copies, "carry_out", interrupted)
    for command in (SETUP, JUDGE):
        ours.send(command)
    worker.serve(theirs)


def test_what_is_wrong_in_a_worker_is_told(pipe, monkeypatch):
    def wrong(copies, *call):
        raise ValueError("wrong")

    theirs, ours = pipe
    monkeypatch.setattr(worker.Copies, "carry_out", wrong)
    for command in (SETUP, JUDGE):
        ours.send(command)
    with pytest.raises(ValueError, match="wrong"):
        worker.serve(theirs)
