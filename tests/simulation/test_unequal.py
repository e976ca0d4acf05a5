"""Unequal islands, and extra ones: who waits, and what that costs."""

import math

import pytest

from diloco_jax.config import ConfigError
from diloco_jax.simulation.fleets.unequal import (
    MixConfig,
    ScavengeConfig,
    simulate_mix,
    simulate_scavenge,
)


def test_islands_of_the_product_never_wait_as_those_in_lockstep_do():
    rows = {row.name: row for row in simulate_mix(MixConfig(hours=0.5))}
    lockstep, of_all = rows["lockstep"], rows["K = M"]
    of_one, graced = rows["K = 1"], rows["K = 1 with grace"]
    assert lockstep.goodput == pytest.approx(0.84, abs=0.01)
    assert lockstep.published_goodput == 0.84
    # All make as many steps: 10.9 s of work in 84 % of the time.
    expected = 3600 / (10.9 / 0.84)
    assert lockstep.merges_per_hour == pytest.approx(expected, rel=0.02)
    for row in (of_all, of_one, graced):
        assert row.compute_goodput == pytest.approx(1.0, abs=0.02)
        assert row.goodput == pytest.approx(1.0, abs=0.03)
    assert of_all.participation == 1.0
    assert graced.participation > of_one.participation + 0.2
    assert of_all.merges_per_hour < of_one.merges_per_hour, "at the slowest's pace"


@pytest.mark.parametrize(
    "fields", [{"v6e": 3}, {"gap": 0.3}, {"step_spread": 0.2}, {"step_spread": 0}]
)
def test_other_settings_have_no_published_figures(fields):
    rows = simulate_mix(MixConfig(hours=0.02, **fields))
    assert not any(row.published_goodput for row in rows)
    if fields == {"step_spread": 0}:  # At most a merge per step of the fast.
        assert all(row.merges_per_hour <= 3600 / 10 for row in rows)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"v6e": 1, "v5p": 0}, "v6e = 1 and v5p = 0 islands"),
        ({"hours": 1e-4}, "hours = 0.0001 is less than a step of .* 10 with gap = 0.1"),
        ({"step_seconds": 1e-6}, "steps of islands to simulate, more than"),
        ({"step_seconds": 1e-320}, "step_seconds = 1e-320; .* at least 1e-06"),
        ({"v6e": 20_000, "hours": 0.01}, "pairs of 20,004 islands .*; lower v6e or v5"),
    ],
)
def test_bad_numbers_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        simulate_mix(MixConfig(**fields))


def test_extra_islands_shorten_the_run_almost_as_much_as_they_could():
    config = ScavengeConfig(islands=2, extra=(0.5, 1.0), hours=1.5)
    half, double = simulate_scavenge(config)
    assert half.best_ratio == pytest.approx(0.5 + 0.5 / 1.5)
    assert double.best_ratio == pytest.approx(0.75)
    for row in (half, double):
        assert row.best_ratio < row.time_ratio < row.best_ratio + 0.08
    assert (half.published_ratio, double.published_elastic_ratio) == (0.83, 1.02)
    (most,) = simulate_scavenge(
        ScavengeConfig(islands=2, extra=(1.0,), tokens_share=0.8, hours=1.0)
    )
    assert most.published_ratio is None, "they are for half of the tokens"
    assert most.best_ratio == pytest.approx(0.6)


def test_a_share_that_is_whole_but_for_rounding_is_taken():
    assert 0.29 * 100 != 29
    ScavengeConfig(islands=100, extra=(0.29,)).validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra": (1.0, 1e5)}, "6.4e.11 pairs of 800,008 islands .*, or extra = 1000"),
        ({"extra": (1e300,)}, "inf pairs of 8e.300 islands to simulate"),
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
def test_bad_numbers_of_extra_islands_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        simulate_scavenge(ScavengeConfig(**fields))
