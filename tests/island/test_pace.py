"""The learning rate follows the run, whatever becomes of the others' tokens."""

import pytest

from diloco_jax.config import InnerConfig, RunConfig
from diloco_jax.island.pace import Pace
from diloco_jax.protocol.island.boundary import Goal


def pace(**inner):
    inner = InnerConfig(learning_rate=1.0, warmup_fraction=0.0, **inner)
    goal = Goal(total_tokens=1000, tokens_per_step=10, steps_per_cycle=4)
    return Pace(RunConfig(inner=inner), goal)


def test_tokens_that_others_lost_do_not_bring_an_earlier_rate_back():
    run = pace(schedule="cosine", rewarm_steps=0)
    rates = [run.learning_rate(*at) for at in enumerate([300, 500, 100, 600])]
    assert rates[0] > rates[1] == rates[2] > rates[3]


def test_fresh_moments_get_the_whole_rate_after_so_many_steps():
    run = pace(schedule="constant", rewarm_steps=3)
    rates = [run.learning_rate(step, 0) for step in range(5)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])
