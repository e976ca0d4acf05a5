"""Spare processes: with real children that only wait."""

import os
import signal
import sys

import pytest

from diloco_jax.cluster.processes import SPARE_AFTER_S, ManagedProcess

pytestmark = pytest.mark.dist

CHILD = """
import os, sys, time
if "--spare" in sys.argv:
    print("waits", os.getpid(), flush=True)
    if not sys.stdin.readline():
        sys.exit(0)
print("joins", os.getpid(), sys.argv[1], flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.02)
"""


class Watched:
    """A child with spares, whose clock the test moves."""

    def __init__(self, folder):
        self.now, self.log = 0.0, folder / "child.log"
        self.settled = True
        self.may_end = folder / "may_end"
        self.process = ManagedProcess(
            "child",
            lambda start: [[sys.executable, "-c", CHILD, str(start), self.may_end]],
            self.log,
            environment={},
            restarts=2,
            restart_delay_s=0.0,
            stop_s=60.0,
            spares=lambda: self.settled,
            clock=lambda: self.now,
        )

    def said(self, word):
        """The lines of this kind, each as (process id, arguments...)."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [tuple(line.split()[1:]) for line in lines if line.startswith(word)]

    def waiting(self, until):
        """The process id of the spare, once it waits."""
        known = len(self.said("waits"))
        self.now += SPARE_AFTER_S
        self.process.poll()
        until(lambda: len(self.said("waits")) > known, "spare")
        return int(self.said("waits")[-1][0])

    def crash(self, until):
        before = self.process.pids
        os.kill(before[0], signal.SIGKILL)
        until(
            lambda: self.process.poll() == "running" and self.process.pids != before,
            "restart",
        )


@pytest.fixture
def child(tmp_path, until):
    child = Watched(tmp_path)
    child.process.start()
    until(lambda: child.said("joins"), "start")
    yield child
    child.process.kill()


def test_a_spare_takes_the_place_of_a_crashed_child(child, until):
    for attempt in (2, 3):
        spare = child.waiting(until)
        child.crash(until)
        assert child.process.pids == [spare]
        until(lambda lives=attempt: len(child.said("joins")) == lives, "joined")
        assert child.said("joins")[-1] == (str(spare), str(attempt))


def test_a_spare_comes_some_time_after_the_start(child, until):
    child.now = SPARE_AFTER_S - 0.1
    child.process.poll()
    child.crash(until)
    until(lambda: len(child.said("joins")) == 2, "joined")
    assert child.said("waits") == []


def test_a_spare_waits_until_its_command_is_known(child, until):
    child.settled = False
    child.now += 10 * SPARE_AFTER_S
    child.process.poll()
    child.crash(until)
    until(lambda: len(child.said("joins")) == 2, "joined")
    assert child.said("waits") == []
    child.settled = True
    spare = child.waiting(until)
    child.crash(until)
    assert child.process.pids == [spare]


def test_a_spare_that_has_died_is_not_awaited(child, until, alive):
    spare = child.waiting(until)
    os.kill(spare, signal.SIGKILL)
    until(lambda: not alive(spare), "gone")
    child.crash(until)
    until(lambda: len(child.said("joins")) == 2, "joined")
    assert child.said("joins")[-1] == (str(child.process.pids[0]), "2")


def test_a_spare_that_cannot_be_started_is_not_needed(child, until, tmp_path, caplog):
    child.process.log = tmp_path / "none" / "child.log"
    child.now += SPARE_AFTER_S
    assert child.process.poll() == "running"
    assert "child has no spare process" in caplog.text
    child.crash(until)


@pytest.mark.parametrize("how", ["stopped", "done", "killed"])
def test_a_spare_ends_with_its_child(child, until, alive, how):
    spare = child.waiting(until)
    if how == "stopped":
        child.process.stop()
    elif how == "done":
        child.may_end.touch()
    else:
        child.process.kill()
    until(lambda: child.process.poll() != "running", how)
    assert not alive(spare)
    assert len(child.said("joins")) == 1


def test_a_spare_ends_when_no_restart_is_left(child, until, alive):
    for _ in range(2):
        child.crash(until)
    spare = child.waiting(until)
    os.kill(child.process.pids[0], signal.SIGKILL)
    until(lambda: child.process.poll() == "failed", "failed")
    assert not alive(spare)
