"""The comparison with peers gives all of them the same work."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.peers import ours, torchft_group
from benchmarks.peers.work import SCENARIOS, Work
from diloco_jax.models.build import build, build_plan

WORK = Work(scenario="undisturbed", replicas=3, seconds=30.0)


def test_what_is_possible_follows_from_the_steps():
    assert WORK.capacity == pytest.approx(3 * 128 / 0.1)
    slow = Work(scenario="slow", replicas=3, seconds=30.0)
    assert slow.capacity / WORK.capacity == pytest.approx((2 + 1 / 4) / 3)
    assert (WORK.survivors, slow.survivors) == (("r0", "r1", "r2"), ("r0", "r1"))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_our_run_is_of_that_work(scenario):
    work = Work(scenario=scenario, replicas=2, seconds=30.0)
    config = ours.config_of(work)
    sync = config.run.sync
    assert (sync.steps_per_cycle, sync.fragments) == (12, 4)
    assert {sync.codec_up, sync.codec_down} == {"f32"}
    steps = [island.step_seconds for island in config.islands.values()]
    assert steps == [work.pace(name) for name in work.names]
    who = {"killed": "r1", "coordinator lost": "coordinator"}.get(scenario)
    assert [fault.partition("@")[0] for fault in config.placement.faults] == (
        [who] if who else []
    )


def test_the_models_are_of_one_size():
    """Torch is not here: its tensors' sizes are those of the script's constants."""
    text = torchft_group.REPLICA.read_text()
    names = "V, D, N, K, H, F_, LAYERS"
    (values,) = re.findall(rf"^{names} = (.*)$", text, re.M)
    v, d, n, k, h, f, layers = map(int, values.split(","))
    layer = 2 * d + d * h * (n + 2 * k) + n * h * d + 3 * d * f
    run = ours.config_of(WORK).run
    assert 2 * v * d + layers * layer + d == sum(build_plan(run, build(run)).sizes)
