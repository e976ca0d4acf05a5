"""A coordinator whose decisions hang says where, and ends to be started again."""

from __future__ import annotations

import subprocess
import sys

import pytest

from diloco_jax.config import Placement
from diloco_jax.coordinator.watchdog import TurnWatch
from diloco_jax.process import LOOK_S

WAIT_S = 60.0
PLACEMENT = Placement(time_budget_s=5.0, outage_budget_s=20.0)
LIMIT_S = 50.0
"""Longest turn by that placement: 20 s, and 6 time budgets."""


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now

    def looks(self, watch: TurnWatch, most_s: float) -> float:
        """Seconds of looks until one says that it hangs; `most_s` if none does."""
        began = self.now
        while self.now - began < most_s:
            self.now += LOOK_S
            if watch.look():
                break
        return self.now - began


def test_a_turn_may_take_as_long_as_a_disk_that_is_busy_and_no_longer():
    clock = Clock()
    watch = TurnWatch(PLACEMENT, clock=clock)
    for _ in range(5):
        assert clock.looks(watch, LIMIT_S - 2.0) == LIMIT_S - 2.0
        watch.touch()
    assert clock.looks(watch, 1000.0) == pytest.approx(LIMIT_S, abs=2 * LOOK_S)
    words = watch.words(LIMIT_S)
    assert "no turn of the coordinator's decisions has ended for 50 s" in words
    assert "placement.outage_budget_s = 20 and 30 s more" in words
    assert "placement.time_budget_s = 5" in words


TURNING = """
import logging, sys, threading, time
from diloco_jax import process
from diloco_jax.config import Placement
from diloco_jax.coordinator import watchdog
from diloco_jax.coordinator.lead import EngineThread
logging.basicConfig(stream=sys.stderr)
process.LOOK_S, watchdog.TOLD_WITHIN_S = 0.05, 0.5
class Engine:
    state = None
    def decide(self, event, now):
        event()
        return []
def hold_the_log():
    logging.getLogger().handlers[0].acquire()
    where_it_hangs()
def where_it_hangs():
    threading.Event().wait(600)
def often(state, now):
    return now + 0.02
lead = EngineThread(Engine(), often, lambda: None, lambda: None)
threading.Timer(0.5, lead.post, (globals()[sys.argv[1]],)).start()
with watchdog.TurnWatch(Placement(time_budget_s=1 / 12, outage_budget_s=0.5)) as watch:
    lead.touch = watch.touch
    watch.start()
    lead.run()
"""


@pytest.mark.parametrize("hangs", ["where_it_hangs", "hold_the_log"])
def test_a_process_that_hangs_ends_with_1_even_if_its_log_is_what_hangs(hangs):
    """It decides as the coordinator does, until it hangs somewhere. One that is stopped
    does not hang: `tests/island/test_watches.py`."""
    command = [sys.executable, "-c", TURNING, hangs]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert ended.returncode == 1
    if hangs == "where_it_hangs":
        said = ended.stderr
        assert "hangs: no turn of the coordinator's decisions has ended" in said
        assert "in where_it_hangs" in said, "the stack of the decisions' thread"
