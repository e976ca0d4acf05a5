"""When the outpost of a worker on another machine ends."""

from __future__ import annotations

import contextlib
import math
import socket
from concurrent.futures import ThreadPoolExecutor

from outpost_support import elsewhere

from diloco_jax.coordinator.workers.outpost import outpost, patience
from diloco_jax.coordinator.workers.outpost.outpost import Outpost
from diloco_jax.errors import EXIT_FAILED

PATIENCE_S = 60.0


def test_an_outpost_to_which_there_is_no_line_hears_that_the_run_is_over(
    config, tmp_path
):
    made = Outpost(config, 0, tmp_path / "w", config.placement.worker_addresses[0])
    with contextlib.closing(made), ThreadPoolExecutor(1) as pool:
        served = pool.submit(made.serve)
        elsewhere(config, tmp_path / "lead").say_over()
        assert served.result(PATIENCE_S) is True


def test_a_lead_says_which_outpost_does_not_know_that_the_run_is_over(
    config, tmp_path, caplog
):
    elsewhere(config, tmp_path / "lead").say_over()
    assert "worker 0 cannot be told that the run is over" in caplog.text


def test_an_outpost_to_which_no_lead_comes_ends_and_says_so(
    config, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(patience, "FIRST_S", 0.01)
    bind = config.placement.worker_addresses[0]
    assert outpost.run(config, 0, tmp_path / "w", bind) == EXIT_FAILED
    assert f"stays in {tmp_path / 'w'}; start it again with the" in caplog.text


def test_an_outpost_waits_for_the_next_lead_as_long_as_the_last_one_said():
    waits = patience.Patience()
    assert waits.left_s() > 3600.0, "the coordinator may queue for a machine"
    with waits.led(0.0), waits.led(0.0):
        assert waits.left_s() == math.inf
    assert waits.left_s() <= 0.0


class Process:
    """In place of the processes of a worker."""

    def __init__(self) -> None:
        self.ended: list[bool] = []

    def end(self, *, kill: bool) -> None:
        self.ended.append(kill)


def test_a_process_that_fails_is_awaited_unless_a_newer_lead_has_another(config, serve):
    outpost, process = serve(config), Process()
    outpost._here = process
    older, newer = socket.socketpair()
    with older, newer:
        outpost._line = newer
        outpost._await_end(older, True)
        assert process.ended == []
        outpost._await_end(newer, False)
        outpost._await_end(newer, True)
    assert process.ended == [False, True]
    outpost._line = None
