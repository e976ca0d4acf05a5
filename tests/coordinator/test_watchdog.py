"""A failure is told once, within its budget, and again when it begins again; a
coordinator notices that its machine slept, and believes what islands did.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from door_support import CONFIG, Coordinator
from engine_support import hello
from msgspec.structs import replace

from diloco_jax.coordinator.watchdog import LEAST_S, Gauges, Sleeps, Watchdog
from diloco_jax.protocol.coordinator.state import Said
from diloco_jax.protocol.messages import Report

BUDGET_S, COMPILE_S = 10.0, 900.0
GB = 1 << 30


class World:
    """A machine and a status that a test changes."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.resident, self.left, self.free = GB, (50 * GB, 100 * GB), 100 * GB
        self.given_back = self.needed = 0
        self.speed, self.share_merged = 600.0, 0.9
        """Speed of the three islands together, and the share of it that is merged."""
        self.islands = {name: self.island() for name in "abc"}
        self.status: dict[str, Any] = {
            "phase": "running",
            "goodput": 0.9,
            "seconds": 60.0,
            "tokens_merged": 0,
            "islands": self.islands,
        }
        machine = Gauges(
            resident=lambda: self.resident,
            left=lambda: self.left,
            free=lambda folder: self.free,
            give_back=self.give_back,
        )
        self.dog = Watchdog(
            {"workdir": Path("/run")},
            BUDGET_S,
            machine,
            compile_budget_s=COMPILE_S,
            needed=lambda status: {Path("/run"): self.needed},
        )

    def island(self, **changes: Any) -> dict[str, Any]:
        return {
            "state": "training",
            "incarnation": 1,
            "steps": 100,
            "median_step_seconds": 0.5,
            "tokens_per_second": 200.0,
            "loss": 3.0,
            "short": [],
            **changes,
        }

    def give_back(self) -> None:
        self.given_back += 1

    def pass_s(self, seconds: float, *stuck: str) -> list[str]:
        """Time passes, and all islands but those make steps; what is told of it."""
        told = []
        for _ in range(round(2 * seconds)):
            self.now += 0.5
            merged = round(0.5 * self.speed * self.share_merged)
            self.status["tokens_merged"] += merged
            for name, island in self.islands.items():
                island["steps"] += name not in stuck
            told += self.dog.look(self.status, self.now)
        return told


@pytest.fixture
def world() -> World:
    world = World()
    assert world.pass_s(60) == []
    return world


@pytest.mark.parametrize("state", ["joining", "compiling"])
def test_a_start_that_takes_longer_than_it_may_is_told_once(world, state):
    world.islands["b"] |= {"state": state, "incarnation": 2}
    assert world.pass_s(COMPILE_S - 1) == []
    (told,) = world.pass_s(3)
    assert f"island b has been {state} for 900 s, placement.compile_budget_s" in told
    assert world.dog.wrong == ["b does not begin to train"]
    assert world.pass_s(600) == []
    world.islands["b"] |= {"incarnation": 3}
    assert world.pass_s(COMPILE_S - 1) == [], "another incarnation starts anew"
    world.islands["b"] |= {"state": "training"}
    assert world.pass_s(600) == []


@pytest.mark.parametrize("step_s", [0.5, 20.0])
def test_an_island_without_steps_hangs_after_three_budgets_or_20_steps(world, step_s):
    world.islands["b"]["median_step_seconds"] = step_s
    limit_s = max(3 * BUDGET_S, 20 * step_s)
    assert world.pass_s(limit_s - 1, "b") == []
    (told,) = world.pass_s(2, "b")
    made = (
        f"island b has made no step for {limit_s:.0f} s, and its steps take {step_s:g}"
    )
    assert made in told
    assert "placement.hang_budget_s" in told
    assert world.dog.wrong == ["b makes no step"]
    assert world.pass_s(600, "b") == [], "it is told once"
    assert world.pass_s(5) == []
    assert world.dog.wrong == []
    (again,) = world.pass_s(limit_s + 2, "b")
    assert "island b has made no step" in again


def test_the_machine_is_looked_at_every_five_seconds(world):
    world.resident, world.left, world.free = 3 * GB, (5 * GB, 9 * GB), 7 * GB
    before = world.dog.machine
    world.pass_s(5.5)
    assert world.dog.machine is not before
    assert world.dog.machine.named() == {
        "memory_bytes": 3 * GB,
        "memory_left_bytes": 5 * GB,
        "memory_whole_bytes": 9 * GB,
        "disk_free_bytes": 7 * GB,
    }


@pytest.mark.parametrize(
    ("phase", "state"),
    [
        ("running", "absent"),
        ("running", "compiling"),
        ("running", "stopped"),
        ("flushing", "training"),
    ],
)
def test_who_does_not_train_does_not_hang(world, phase, state):
    world.status["phase"] = phase
    for island in world.islands.values():
        island["state"] = state
    assert world.pass_s(600, "a", "b", "c") == []


def test_an_island_that_slows_down_is_told_with_both_speeds(world):
    world.islands["a"]["tokens_per_second"] = 120.0
    assert world.pass_s(60) == []
    world.islands["a"]["tokens_per_second"] = 90.0
    (told,) = world.pass_s(60)
    assert "island a has slowed down: 90 tokens per second, and 200 before" in told
    world.islands["a"] |= {"incarnation": 2, "steps": 0}
    assert world.pass_s(600) == [], "another process has a speed of its own"


def test_a_loss_that_parts_from_the_others_is_told_after_a_minute(world):
    world.islands["c"]["loss"] = 4.0
    assert world.pass_s(59) == []
    (told,) = world.pass_s(3)
    assert "the loss of island c is 4, that of the others 3" in told
    world.islands["c"]["loss"] = 3.1
    world.pass_s(1)
    world.islands["c"]["loss"] = None
    assert world.pass_s(100) == [], "skipped steps have an alert of their own"


def test_one_of_two_that_part_cannot_be_told(world):
    del world.islands["a"]
    world.islands["c"]["loss"] = 4.0
    assert world.pass_s(100) == []


def test_goodput_that_is_low_for_ten_minutes_is_told(world):
    world.share_merged = 0.4
    assert world.pass_s(8 * 60) == []
    (told,) = world.pass_s(60 * 60)
    assert "goodput of the last " in told
    assert "(90% in the whole run)" in told
    assert world.dog.wrong == ["goodput is low"]
    world.share_merged = 0.9
    assert world.pass_s(2 * 60 * 60) == []
    assert world.dog.wrong == []
    world.share_merged = 0.1
    assert len(world.pass_s(60 * 60)) == 1, "however old the run is"


def test_a_machine_that_runs_out_of_memory_or_disk_is_told(world):
    world.left, world.free = (4 * GB, 100 * GB), GB - 1
    little, disk = world.pass_s(6)
    assert "4.3 of 107.4 GB of memory are left" in little
    assert "1074 MB are free in /run" in disk
    assert world.dog.wrong == [
        "little space is left in /run",
        "little memory is left on the coordinator's machine",
    ]
    assert world.given_back > 0
    world.free = GB
    world.pass_s(10)
    world.free = 0
    (again,) = world.pass_s(6)
    assert "0 MB are free" in again


def test_memory_that_comes_back_when_it_is_asked_for_is_nothing_to_tell(world):
    world.left = (4 * GB, 100 * GB)
    world.dog._machine = world.dog._machine._replace(
        give_back=lambda: setattr(world, "left", (50 * GB, 100 * GB))
    )
    assert world.pass_s(60) == []
    assert world.left == (50 * GB, 100 * GB)


def test_a_disk_without_room_for_the_next_round_is_told_long_before_it_is_full(world):
    """A state of 144 GB needs more than one that is small."""
    world.needed, world.free = 157 * GB, 157 * GB
    assert world.pass_s(60) == []
    world.free -= GB
    (told,) = world.pass_s(6)
    assert "167504 MB are free in /run, and the next round" in told
    assert "needs 168577:" in told
    assert world.dog.wrong == ["little space is left in /run"]
    world.needed = 150 * GB
    assert world.pass_s(6) == []
    assert world.dog.wrong == []


def test_what_an_island_is_short_of_is_told_once(world):
    world.islands["b"] |= {"short": ["disk", "memory"]}
    disk, memory = world.pass_s(60)
    assert "island b says that little space on the disk is left on a machine" in disk
    assert "island b says that little memory is left" in memory
    assert world.dog.wrong == [
        "little space is left on a disk of b",
        "little memory is left on a machine of b",
    ]
    world.islands["b"] |= {"short": []}
    assert world.pass_s(5) == []
    assert world.dog.wrong == []


def test_what_it_keeps_does_not_grow(world):
    for number in range(2000):
        world.islands.clear()
        world.islands[f"x{number}"] = world.island(steps=number)
        world.pass_s(0.5)
    assert len(world.dog._islands) == 1
    assert len(world.dog._since) + len(world.dog._told) < 10


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


@pytest.mark.parametrize("slept_s", [0.0, 600.0])
def test_an_island_is_believed_what_it_did_while_the_machine_slept(
    slept_s: float, tmp_path
) -> None:
    config = replace(CONFIG, total_tokens=10**9, least_seconds={"": LEAST_STEP_S})
    made, machine = Coordinator(tmp_path, config=config), Machine()
    made.lead._sleeps = machine.sleeps()
    here = {"run_id": config.run_id, "fingerprint": config.fingerprint}
    made.lead.post(hello("c", session="s", tokens_per_step=4, **here))

    def report(steps: int) -> None:
        said = Report(phase="training", steps=steps, step_seconds=LEAST_STEP_S)
        made.lead.post(Said(island="c", session="s", message=said))
        made.run()

    report(0)
    machine.unix += slept_s
    report(made.state.islands["c"].sequences_granted)
    made.tape.close()
    status, alerts = made.state.islands["c"].status, made.lead.journal.alerts
    assert status == ("live" if slept_s else "gone")
    assert bool(slept_s) == any("machine slept for 600 s" in told for told in alerts)
