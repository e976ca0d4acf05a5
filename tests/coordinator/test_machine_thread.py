"""The machine's thread: answers of the object, and objects that do not answer."""

from __future__ import annotations

import threading

import pytest

from diloco_jax.coordinator.mandates.folder import FolderStore
from diloco_jax.coordinator.standby.machine_thread import (
    CALLS_AT_ONCE,
    MachineThread,
)
from diloco_jax.protocol.standby import primary
from diloco_jax.protocol.standby.events import RecordWritten, Reign, Release
from diloco_jax.protocol.standby.mandate import Mandate, MandateTiming

TIMING = MandateTiming(valid_s=2.0, renew_s=0.1, patience_s=0.1)
WITHIN_S = 30.0


class Hanging:
    """An object that does not answer until it is let go."""

    def __init__(self, store: FolderStore) -> None:
        self.store, self.hangs = store, threading.Event()
        self.calls = 0

    def read(self, timeout_s: float) -> tuple[str, Mandate | None]:
        self.calls += 1
        self.hangs.wait(WITHIN_S)
        return self.store.read(timeout_s)

    def write(self, mandate: Mandate, generation: str, timeout_s: float) -> str | None:
        self.hangs.wait(WITHIN_S)
        return self.store.write(mandate, generation, timeout_s)


@pytest.fixture
def store(tmp_path) -> FolderStore:
    return FolderStore(str(tmp_path / "mandate"))


def machine(store, act):
    return MachineThread(
        primary.step,
        primary.next_deadline,
        primary.seek(TIMING, "a", "r", "1"),
        store,
        TIMING,
        act,
    )


def test_the_mandate_is_taken_renewed_and_shows_what_is_written(store) -> None:
    effects = []
    made = machine(store, effects.append)
    made.start()
    assert made.wait_for(lambda s: s.phase == "alone", WITHIN_S)
    first = store.read(1.0)[0]
    made.give(RecordWritten(number=1))
    assert made.wait_for(lambda s: s.visible == 1, WITHIN_S)
    assert made.wait_for(lambda s: number(s.generation) > number(first) + 1, WITHIN_S)
    made.close(WITHIN_S)
    assert effects == [Reign(number=1, gathers=False), Release(through=1)]


def number(generation: str) -> int:
    return int(generation.partition("-")[0])


def test_an_object_that_hangs_is_asked_again_by_few_threads_only(store) -> None:
    hanging = Hanging(store)
    made = machine(hanging, lambda effect: None)
    made.start()
    assert not made.wait_for(lambda s: s.phase == "alone", 1.5)
    assert 1 < hanging.calls <= CALLS_AT_ONCE
    hanging.hangs.set()
    assert made.wait_for(lambda s: s.phase == "alone", WITHIN_S)
    made.close(WITHIN_S)


def test_an_event_is_left_out_if_its_condition_is_over(store) -> None:
    made = machine(store, lambda effect: None)
    made.start()
    assert made.wait_for(lambda s: s.phase == "alone", WITHIN_S)
    made.give(RecordWritten(number=1), lambda: False)
    assert made.state.written == 0
    made.close(WITHIN_S)
