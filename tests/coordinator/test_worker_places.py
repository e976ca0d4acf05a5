"""Where a worker's process runs, and how its end is awaited."""

from __future__ import annotations

import subprocess

from diloco_jax.coordinator.workers.places import Here


class Hangs:
    """A process in a call of the kernel that does not return: no signal ends it."""

    pid = 77

    def __init__(self) -> None:
        self.killed = 0

    def poll(self) -> None:
        return None

    def kill(self) -> None:
        self.killed += 1

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "it would wait forever"
        raise subprocess.TimeoutExpired("worker", timeout)


def test_a_process_that_no_signal_ends_is_told_and_left(tmp_path, caplog):
    place = Here(tmp_path, 3, 0.5)
    place._process = process = Hangs()
    place.end(kill=False)
    assert process.killed == 1
    assert "process 77 of worker 3 was killed and has not ended within 0.5 s" in (
        caplog.text
    )
