"""An island whose machine is taken away: what it sent is merged although it left."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from runtime_support import (
    PATIENCE_S,
    await_message,
    client,
    coordinator,
    hello,
    make_config,
    placed,
    report,
    took,
    upload_start,
)

from diloco_jax.config import Config
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.island import main
from diloco_jax.observability.tape import read_tape
from diloco_jax.wire import messages


class Other:
    """Island b, which answers a take only after island a has left, and the incarnation
    of a that comes after it. Two are a quorum."""

    def __init__(self, config: Config, service: Coordinator) -> None:
        self._config, self._service = config, service
        self.thread = threading.Thread(target=self._live)
        self.errors: list[BaseException] = []
        self.alone = threading.Event()
        """Set once island a has ended."""

    def _live(self) -> None:
        try:
            with client(self._service.address) as island:
                own = hello(self._config, "b")
                stream = island.open_control(own)
                self._wait(lambda state: state.islands["a"].phase == "training")
                stream.send(report(1))
                stream.send(report(5))
                take = await_message(stream, messages.TakeRequest)
                self._wait(lambda state: _arrived(state))
                os.kill(os.getpid(), signal.SIGTERM)
                self._wait(lambda state: state.islands["a"].status == "gone")
                self._answer(island, own, stream, take, 5)
                next_of_a = hello(self._config, "a", incarnation=2, session="second")
                with client(self._service.address) as again:
                    its = again.open_control(next_of_a)
                    its.send(report(1))
                    its.send(report(5))
                    stream.send(report(9))
                    take = await_message(its, messages.TakeRequest)
                    self._answer(again, next_of_a, its, take, 5)
                    self._wait(lambda state: state.fragments[0].merges == 1)
        except BaseException as error:
            self.errors.append(error)
            if not self.alone.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

    def _answer(self, island, own, stream, take, steps: int) -> None:
        """Takes, and sends a delta of zeros."""
        stream.send(report(steps, took(take, seq=1, steps=steps)))
        size = self._service.store.layouts_up[take.fragment].total_bytes
        start = upload_start(own, stream.welcome.run_id, take, size)
        island.upload(start, bytes(size))

    def _wait(self, happened) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            state = self._service.engine.state
            if "a" in state.islands and happened(state):
                return
            assert time.monotonic() < deadline, state
            time.sleep(0.01)


def _arrived(state) -> bool:
    take = state.fragments[0].accounts["a"].take
    return take is not None and take.ready


@pytest.mark.timeout(2 * PATIENCE_S)
def test_what_an_island_sent_is_merged_after_its_goodbye(
    text: Path, tmp_path: Path
) -> None:
    config = make_config(text, cycles=1000, fragments=1)
    config = placed(config, time_budget_s=PATIENCE_S, notice_s=PATIENCE_S / 2)
    with coordinator(config, tmp_path) as service:
        other = Other(config, service)
        other.thread.start()
        code = main.run(config, "a", service.address, tmp_path / "a", 1)
        other.alone.set()
        other.thread.join(PATIENCE_S)
    assert not other.errors, other.errors
    assert code == 1  # Whoever supervises it starts it again.
    tape = [r for r in read_tape(tmp_path / "tape.jsonl") if r["kind"] != "island"]
    kinds = [record["kind"] for record in tape]
    merged, left = kinds.index("merged"), kinds.index("left")
    assert left < merged
    (kept,) = tape[left]["left_behind"]
    assert tape[left]["reason"] == "preempted (SIGTERM)"
    parts = tape[merged]["contributions"]
    whose = [(c["island"], c["incarnation"], c["tick"]) for c in parts]
    assert whose[0] == ("a", 1, kept["tick"])
    assert [who[:2] for who in whose[1:]] == [("a", 2), ("b", 1)]
