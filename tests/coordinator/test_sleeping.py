"""A coordinator notices that its machine slept, and believes what islands did."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from door_support import CONFIG, Coordinator
from msgspec.structs import replace

from diloco_jax.coordinator import watchdog
from diloco_jax.coordinator.watchdog import LEAST_S, Sleeps
from diloco_jax.protocol.coordinator.events import Said
from diloco_jax.protocol.messages import Hello, Report

LEAST_STEP_S = 0.5


class Machine:
    """Has a time of day, and a clock that stands still while it sleeps."""

    def __init__(self) -> None:
        self.unix, self.now = 1e9, 5.0

    def sleeps(self) -> Sleeps:
        return Sleeps(lambda: self.unix, lambda: self.now)

    def run(self, seconds: float) -> None:
        self.unix, self.now = self.unix + seconds, self.now + seconds


def test_a_sleep_is_noticed_once_and_a_correction_is_not() -> None:
    machine = Machine()
    sleeps = machine.sleeps()
    machine.run(100.0)
    assert sleeps.since_last_s() == 0.0
    machine.unix += 3600.0
    machine.run(2.0)
    assert sleeps.since_last_s() == pytest.approx(3600.0)
    assert sleeps.since_last_s() == 0.0
    for corrected_s in (-50.0, LEAST_S / 2, LEAST_S / 2, LEAST_S / 2):
        machine.unix += corrected_s
        assert sleeps.since_last_s() == 0.0


def test_the_clock_of_permissions_passes_during_sleep(monkeypatch) -> None:
    clocks = {"monotonic": lambda: 33.0}
    for more, shown in (
        ({}, 33.0),
        ({"CLOCK_BOOTTIME": 7, "clock_gettime": {7: 77.0}.get}, 77.0),
    ):
        monkeypatch.setattr(watchdog, "time", SimpleNamespace(**clocks, **more))
        assert watchdog.clock() == shown


@pytest.mark.parametrize("slept_s", [0.0, 600.0])
def test_an_island_is_believed_what_it_did_while_the_machine_slept(
    slept_s: float, tmp_path
) -> None:
    config = replace(CONFIG, total_tokens=10**9, least_seconds={"": LEAST_STEP_S})
    made, machine = Coordinator(tmp_path, config=config), Machine()
    made.lead._sleeps = machine.sleeps()
    hello = Hello(
        run_id=config.run_id,
        fingerprint=config.fingerprint,
        island="c",
        incarnation=1,
        session="s",
        tokens_per_step=4,
        sequences_per_step=1,
    )
    made.lead.post(hello)

    def report(steps: int) -> None:
        said = Report(phase="training", steps=steps, step_seconds=LEAST_STEP_S)
        made.lead.post(Said(island="c", session="s", message=said))
        made.run()

    report(0)
    machine.unix += slept_s
    report(made.state.islands["c"].sequences_granted)
    made.tape.close()
    status = made.state.islands["c"].status
    assert status == ("live" if slept_s else "gone")
