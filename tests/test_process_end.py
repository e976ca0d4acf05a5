"""Processes with threads in C++ end with their own exit code."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from diloco_jax import cli
from diloco_jax.exit_codes import EXIT_FAILED

BUSY = textwrap.dedent(
    """
    import atexit, sys, threading
    import jax, numpy
    from diloco_jax import cli

    def in_jax(begun):
        step, values = jax.jit(lambda x: x * 2), numpy.ones(1000)
        while True:
            values = numpy.asarray(step(values))
            begun.set()

    def command(arguments):
        begun = threading.Event()
        for _ in range(3):
            threading.Thread(target=in_jax, args=(begun,), daemon=True).start()
        assert begun.wait(60)
        atexit.register(print, "registered", end="")
        print("said", end=" ")
        if "fails" in arguments:
            raise RuntimeError("a bug")
        return 7

    name = sys.argv[1]
    cli.COMMANDS[name] = (command, "", "")
    cli.script()
    """
)


def ends(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BUSY, *words]
    # jax warns of an entry that a killed process has left half written.
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", cli.MEMBERS)
def test_a_member_keeps_its_exit_code_while_threads_are_in_jax(name):
    done = ends(name)
    assert (done.returncode, done.stdout) == (7, "said registered")


@pytest.mark.parametrize("name", cli.MEMBERS)
def test_a_member_that_fails_for_no_known_reason_leaves_in_order(name):
    """An abort would say -6 to its launcher, and nothing of the reason to its log."""
    done = ends(name, "fails")
    assert (done.returncode, done.stdout) == (EXIT_FAILED, "said registered")
    first, *_, last = done.stderr.splitlines()
    assert (first, last) == (
        "Traceback (most recent call last):",
        "RuntimeError: a bug",
    )


AWAY = textwrap.dedent(
    """
    import sys, time
    from diloco_jax import cli

    def command(arguments):
        print("up", flush=True)  # As it would import jax.
        time.sleep(60)

    cli.COMMANDS[sys.argv[1]] = (command, "", "")
    cli.script()
    """
)
CONTAINER = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child")
"""A container's first process is number 1 of its own."""


@pytest.mark.parametrize("name", cli.MEMBERS)
def test_the_first_process_of_a_container_ends_at_a_notice_that_comes_early(name):
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode:
        pytest.skip("this machine makes no containers for its users")
    line = [*CONTAINER, sys.executable, "-c", AWAY, name]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdout.readline() == "up\n"
        numbers = pathlib.Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
        (first,) = map(int, numbers.read_text().split())
        os.kill(first, signal.SIGTERM)
        assert outside.wait(30) == 128 + signal.SIGTERM
