"""Extra islands for a part of the run."""

import math

import pytest

from diloco_jax.config import ConfigError
from diloco_jax.simulation.fleets.scavenge import ScavengeConfig, simulate_scavenge


def test_extra_islands_shorten_the_run_almost_as_much_as_they_could():
    config = ScavengeConfig(islands=2, extra=(0.5, 1.0), hours=1.5)
    half, double = simulate_scavenge(config)
    assert half.best_ratio == pytest.approx(0.5 + 0.5 / 1.5)
    assert double.best_ratio == pytest.approx(0.75)
    for row in (half, double):
        assert row.best_ratio < row.time_ratio < row.best_ratio + 0.08
    assert half.published_ratio == 0.83
    assert double.published_elastic_ratio == 1.02


def test_published_figures_are_for_half_of_the_tokens_only():
    config = ScavengeConfig(islands=2, extra=(1.0,), tokens_share=0.8, hours=1.0)
    (row,) = simulate_scavenge(config)
    assert row.published_ratio is None
    assert row.best_ratio == pytest.approx(0.6)


def test_a_share_that_is_whole_but_for_rounding_is_taken():
    assert 0.29 * 100 != 29
    ScavengeConfig(islands=100, extra=(0.29,)).validate()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (1e5, "6.4e.11 pairs of 800,008 islands .*; lower islands, or extra = 100000"),
        (1e300, "inf pairs of 8e.300 islands to simulate"),
    ],
)
def test_extra_islands_count_among_those_to_get_through(extra, message):
    with pytest.raises(ConfigError, match=message):
        ScavengeConfig(extra=(1.0, extra), hours=0.1).validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra": (math.nan,)}, "extra = nan of islands = 8"),
        ({"extra": (math.inf,)}, "extra = inf of islands = 8"),
        ({"extra": (0.3,)}, "extra = 0.3 of islands = 8 is 2.4 islands; choose"),
        ({"extra": (-1.0,)}, "extra = -1 of islands = 8"),
        ({"tokens_share": 0}, "tokens_share = 0; choose"),
        ({"quorum": 9}, "quorum = 9, but islands = 8"),
        ({"extra": ()}, "extra is empty; give"),
        ({"hours": 0.001}, "hours = 0.001 is less than step_seconds = 10; raise hours"),
        ({"hours": 1e15}, "steps of islands to simulate, more than .* lower hours"),
    ],
)
def test_bad_numbers_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        simulate_scavenge(ScavengeConfig(**fields))
