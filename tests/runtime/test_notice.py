"""An island whose machine is taken away: what it sent is merged although it left."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from runtime_support import (
    PATIENCE_S,
    answer,
    await_message,
    await_state,
    client,
    coordinator,
    hello,
    make_config,
    placed,
    report,
)

from diloco_jax.config import Config
from diloco_jax.coordinator.main import Coordinator
from diloco_jax.island import main
from diloco_jax.observability.tape import read_tape
from diloco_jax.protocol import messages


class Other:
    """Island b, which answers takes only after island a has left, and the incarnation
    of a that comes after it. Two are a quorum; fragments are 0 and 1 in turn."""

    def __init__(self, config: Config, service: Coordinator) -> None:
        self._config, self._service = config, service
        self.thread = threading.Thread(target=self._live)
        self.errors: list[BaseException] = []
        self.alone = threading.Event()
        """Set once island a has ended."""

    def _live(self) -> None:
        service = self._service
        try:
            with client(service.address) as island:
                own = hello(self._config, "b")
                stream = island.open_control(own)
                await_state(service, _trains)
                stream.send(report(1))
                stream.send(report(3))
                take = await_message(stream, messages.TakeRequest)
                await_state(service, _arrived)
                os.kill(os.getpid(), signal.SIGTERM)
                await_state(service, lambda state: state.islands["a"].status == "gone")
                answer(service, island, own, stream, take, seq=1, steps=3)
                next_of_a = hello(self._config, "a", incarnation=2, session="second")
                with client(service.address) as again:
                    its = again.open_control(next_of_a)
                    its.send(report(1))
                    its.send(report(3))
                    stream.send(report(5))
                    take = await_message(its, messages.TakeRequest)
                    answer(service, again, next_of_a, its, take, seq=1, steps=3)
                    take = await_message(stream, messages.TakeRequest)
                    answer(service, island, own, stream, take, seq=2, steps=3)
                    await_state(service, lambda state: state.fragments[1].merges == 1)
        except BaseException as error:
            self.errors.append(error)
            if not self.alone.is_set():
                os.kill(os.getpid(), signal.SIGTERM)


def long_run(text: Path, **placement: float) -> Config:
    """Island a alone takes longer than anybody waits, so that it does not end first."""
    config = make_config(text, cycles=1000)
    a = dataclasses.replace(config.islands["a"], step_seconds=0.02)
    config = dataclasses.replace(config, islands={**config.islands, "a": a}).validate()
    return placed(config, time_budget_s=PATIENCE_S, **placement)


def _trains(state) -> bool:
    return "a" in state.islands and state.islands["a"].phase == "training"


def _arrived(state) -> bool:
    take = state.fragments[0].accounts["a"].take
    return take is not None and take.ready


@pytest.mark.timeout(2 * PATIENCE_S)
def test_what_an_island_sent_is_merged_after_its_goodbye(
    text: Path, tmp_path: Path
) -> None:
    config = long_run(text, notice_s=PATIENCE_S / 2)
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
    assert tape[left]["reason"] == "preempted"
    assert tape[left]["said"] == "preempted (SIGTERM)"
    kept = {delta["fragment"]: delta for delta in tape[left]["left_behind"]}
    asked = next(r for r in tape if r["kind"] == "tick")
    assert (asked["fragment"], asked["tick"]) == (0, kept[0]["tick"])
    assert kept[1]["end"] == tape[left]["steps"], "asked for because it leaves"
    assert tape[merged]["fragment"] == 1
    parts = tape[merged]["contributions"]
    whose = [(c["island"], c["incarnation"], c["tick"]) for c in parts]
    assert whose[0] == ("a", 1, kept[1]["tick"])
    assert [who[:2] for who in whose[1:]] == [("a", 2), ("b", 1)]


@pytest.fixture
def listens() -> Iterator[None]:
    """Ctrl-C is not ignored, as it is in a shell's background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.usefixtures("listens")
def test_ctrl_c_ends_an_island_with_a_goodbye(text: Path, tmp_path: Path) -> None:
    config = long_run(text)

    def interrupt(service: Coordinator) -> None:
        await_state(service, _trains)
        os.kill(os.getpid(), signal.SIGINT)

    with coordinator(config, tmp_path) as service, ThreadPoolExecutor(1) as pool:
        interrupted = pool.submit(interrupt, service)
        code = main.run(config, "a", service.address, tmp_path / "a", 1)
        interrupted.result(PATIENCE_S)
    assert code == 0
    (left,) = [r for r in read_tape(tmp_path / "tape.jsonl") if r["kind"] == "left"]
    assert (left["reason"], left["said"]) == ("stopped", "asked to end by SIGINT")
