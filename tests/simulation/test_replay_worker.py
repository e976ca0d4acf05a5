"""The end of a process that repeats islands."""

from multiprocessing import Pipe

import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.config import RunConfig
from diloco_jax.simulation.replay import worker
from diloco_jax.simulation.replay.recording import Who
from diloco_jax.simulation.replay.worker import Call, Setup, decode, encode

SETUP = Setup(run=RunConfig())
JUDGE = Call(Who("a", 1), "judge", [0, "settled"])


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
        ours.send_bytes(encode(command))
    ours.close()
    worker.serve(theirs)


@pytest.mark.parametrize("reads", [False, True])
def test_a_commander_that_does_not_wait_for_the_answer(pipe, monkeypatch, reads):
    theirs, ours = pipe

    def carry_out(copies, call):
        if reads:
            ours.recv_bytes()
        ours.close()
        return b"a delta"

    monkeypatch.setattr(worker.Copies, "carry_out", carry_out)
    for command in (SETUP, JUDGE):
        ours.send_bytes(encode(command))
    worker.serve(theirs)


def test_an_interrupt_is_the_end_without_a_word(pipe, monkeypatch):
    def interrupted(copies, call):
        raise KeyboardInterrupt

    theirs, ours = pipe
    monkeypatch.setattr(worker.Copies, "carry_out", interrupted)
    for command in (SETUP, JUDGE):
        ours.send_bytes(encode(command))
    worker.serve(theirs)


def test_what_is_wrong_in_a_worker_is_told(pipe, monkeypatch):
    def wrong(copies, call):
        raise ValueError("wrong")

    theirs, ours = pipe
    monkeypatch.setattr(worker.Copies, "carry_out", wrong)
    for command in (SETUP, JUDGE):
        ours.send_bytes(encode(command))
    with pytest.raises(ValueError, match="wrong"):
        worker.serve(theirs)


@pytest.mark.parametrize("dtype", [np.int32, np.float32, jnp.bfloat16, np.bool_])
def test_an_array_keeps_dtype_shape_and_bits_in_the_pipe(dtype):
    array = np.arange(6).astype(dtype).reshape(2, 3)[:, ::-1]
    call = Call(Who("a", 1), "step", [{"tokens": array, "one": np.ones(())}, 0.5])
    found = decode(encode(call), Call)
    batch, rate = found.arguments
    assert (found.who, found.method, rate) == (call.who, "step", 0.5)
    assert (batch["tokens"].dtype, batch["one"].shape) == (array.dtype, ())
    np.testing.assert_array_equal(batch["tokens"], array)


def test_the_run_arrives_as_it_was_sent():
    assert decode(encode(SETUP), Setup) == SETUP


def test_only_arrays_and_plain_values_go_through_the_pipe():
    with pytest.raises(TypeError, match="a module cannot be sent to a worker"):
        encode(np)
