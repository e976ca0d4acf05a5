"""A loop that hangs is noticed within its budget, says where, and its process ends."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest

from diloco_jax.config import IslandConfig
from diloco_jax.island.device.mesh import require_accelerator
from diloco_jax.island.watches import HangWatch
from diloco_jax.process import LOOK_S


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def hangs_after(watch: HangWatch, clock: Clock, most_s: float) -> float:
    """Seconds of looks until it says so; `most_s` if it does not."""
    began = clock.now
    while clock.now - began < most_s:
        clock.now += LOOK_S
        if watch.look():
            break
    return clock.now - began


@pytest.fixture
def clock() -> Clock:
    return Clock()


def watch_of(clock: Clock, budget_s: float) -> HangWatch:
    return HangWatch(budget_s, lambda text: None, clock)


def test_silence_beyond_the_budget_is_a_hang(clock):
    watch = watch_of(clock, 30.0)
    assert hangs_after(watch, clock, 100.0) == pytest.approx(30.0, abs=2 * LOOK_S)


def test_a_touch_begins_the_budget_anew(clock):
    watch = watch_of(clock, 30.0)
    for _ in range(20):
        assert hangs_after(watch, clock, 20.0) == 20.0
        watch.touch()
    assert hangs_after(watch, clock, 100.0) == pytest.approx(30.0, abs=2 * LOOK_S)


def test_a_machine_that_stands_still_does_not_hang(clock):
    watch = watch_of(clock, 30.0)
    for _ in range(10):
        clock.now += 3600.0
        assert not watch.look()


def test_without_a_budget_nothing_hangs(clock):
    assert hangs_after(watch_of(clock, 0.0), clock, 5000.0) == 5000.0


def test_a_part_of_the_start_may_take_what_its_setting_says_and_the_budget(clock):
    watch, told = watch_of(clock, 30.0), []
    watch.hangs = told.append
    with watch:
        watch.begin("connecting", 10.0, "placement.outage_budget_s")
        assert hangs_after(watch, clock, 39.0) == 39.0
        watch.begin("compiling", 200.0, "placement.compile_budget_s")
        assert hangs_after(watch, clock, 500.0) == pytest.approx(230.0, abs=2 * LOOK_S)
        watch._tell()
    assert "compiling may take 200 s (placement.compile_budget_s), and" in told[0]
    assert "placement.hang_budget_s = 30" in told[0]


def test_the_loop_has_its_own_budget_after_the_start(clock):
    watch = watch_of(clock, 30.0)

    class Loop:
        touch = None

        def run(self):
            return hangs_after(watch, clock, 100.0)

    with watch:
        watch.begin("restoring", 1000.0, "placement.outage_budget_s")
        hangs_after(watch, clock, 900.0)
        assert watch.run(Loop()) == pytest.approx(30.0, abs=2 * LOOK_S)


def test_without_a_budget_no_start_hangs(clock):
    watch = watch_of(clock, 0.0)
    with watch:
        watch.begin("compiling", 1.0, "placement.compile_budget_s")
        assert hangs_after(watch, clock, 5000.0) == 5000.0


HANGING = """
import logging, sys, threading
from diloco_jax import process
from diloco_jax.island.watches import HangWatch, end_hanging
logging.basicConfig(stream=sys.stderr)
process.LOOK_S = 0.05
class Loop:
    touch = None
    def run(self):
        self.touch()
        where_it_hangs()
def where_it_hangs():
    threading.Event().wait(600)
def stop(ending):
    print("goodbye", ending.exit_code, ending.text, flush=True)
    BLOCKS
def hangs(text):
    end_hanging(stop, text, 0.3)
PART
HangWatch(0.5, hangs).run(Loop())
"""
COMPILING = """
watch = HangWatch(0.25, hangs)
watch.begin("compiling", 0.25, "placement.compile_budget_s")
where_it_hangs()
"""


@pytest.mark.parametrize("blocks", ["pass", "where_it_hangs()"])
@pytest.mark.parametrize("part", ["", COMPILING])
def test_a_hanging_process_says_goodbye_if_it_can_and_ends_with_1(blocks, part):
    code = HANGING.replace("BLOCKS", blocks).replace("PART", part)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("goodbye 1 hangs: no step and no boundary for ")
    assert ("compiling may take 0 s" in done.stdout) == bool(part)
    assert f"placement.hang_budget_s = {0.25 if part else 0.5}" in done.stdout
    assert "in where_it_hangs" in done.stderr, "the stack of the loop's thread"


def test_a_host_that_lost_its_accelerator_is_named(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    island = IslandConfig(topology="v6e:2x2")
    with pytest.raises(RuntimeError, match=r"v6e:2x2, .* has lost its accelerator"):
        require_accelerator(island, {})
    require_accelerator(island, {"JAX_PLATFORMS": "cpu"})
    require_accelerator(IslandConfig(), {})
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    require_accelerator(island, {})
