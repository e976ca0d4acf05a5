"""Which strikes `diloco chaos` carries out, before anything is started."""

import dataclasses

import pytest

from diloco_jax.chaos.command import scheduled, with_restarts
from diloco_jax.chaos.options import ChaosOptions
from diloco_jax.config import Config, ConfigError, IslandConfig, Placement, RunConfig

CUT = ChaosOptions(strikes=("a@5s:partition3",))


def config(workers=1):
    placement = Placement(workers=workers, restarts=2)
    islands = {"a": IslandConfig(), "b": IslandConfig()}
    return Config(run=RunConfig(), islands=islands, placement=placement)


def test_strikes_go_before_a_random_schedule():
    assert [str(s) for s in scheduled(config(), CUT)] == ["a@5s:partition3"]
    options = ChaosOptions(schedule_seed=4, every_s=10.0, for_s=50.0)
    found = scheduled(config(), options)
    assert len(found) == 5
    other = dataclasses.replace(options, schedule_seed=5)
    assert found != scheduled(config(), other)


def test_links_of_workers_are_not_struck():
    with pytest.raises(ConfigError, match=r"placement\.workers = 2 have links"):
        scheduled(config(2), CUT)
    assert scheduled(config(2), ChaosOptions(strikes=("a@5s:kill",)))


def test_each_kill_has_a_restart():
    strikes = scheduled(config(), ChaosOptions(strikes=("a@5s:kill", "b@5s:stop1")))
    assert with_restarts(config(), strikes).placement.restarts == 3
