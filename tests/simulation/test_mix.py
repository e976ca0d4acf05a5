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


@pytest.fixture(scope="module")
def rows():
    return {row.name: row for row in simulate_mix(MixConfig(hours=0.5))}


def test_waiting_for_all_costs_the_published_sixth(rows):
    assert rows["lockstep"].goodput == pytest.approx(0.84, abs=0.01)
    assert rows["lockstep"].published_goodput == 0.84
    # All make as many steps: 10.9 s of work in 84 % of the time.
    expected = 3600 / (10.9 / 0.84)
    assert rows["lockstep"].merges_per_hour == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("field", ["v6e", "gap", "step_spread"])
def test_published_figures_are_for_their_setting_only(field):
    other = {"v6e": 3, "gap": 0.3, "step_spread": 0.2}[field]
    rows = simulate_mix(MixConfig(hours=0.01, **{field: other}))
    assert not any(row.published_goodput for row in rows)


@pytest.mark.parametrize("hours", [0.01, 0.1])
def test_no_merge_rate_is_above_a_merge_per_step_of_the_fast(hours):
    rows = simulate_mix(MixConfig(hours=hours, step_spread=0))
    assert all(row.merges_per_hour <= 3600 / 10 for row in rows)


@pytest.mark.parametrize("name", ["K = 1", "K = 1 with grace", "K = M"])
def test_islands_of_the_product_never_wait(rows, name):
    assert rows[name].compute_goodput == pytest.approx(1.0, abs=0.02)
    assert rows[name].goodput == pytest.approx(1.0, abs=0.03)


def test_grace_brings_the_slow_ones_in(rows):
    assert rows["K = M"].participation == 1.0
    assert rows["K = 1 with grace"].participation > rows["K = 1"].participation + 0.2


def test_a_quorum_of_all_merges_at_the_pace_of_the_slowest(rows):
    assert rows["K = M"].merges_per_hour < rows["K = 1"].merges_per_hour


def test_more_islands_than_the_policy_gets_through_are_refused():
    config = MixConfig(v6e=20_000, hours=0.01)
    with pytest.raises(
        ConfigError, match=r"pairs of 20,004 islands .*; lower v6e or v5p"
    ):
        config.validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"v6e": 1, "v5p": 0}, "v6e = 1 and v5p = 0 islands"),
        ({"hours": 1e-4}, "hours = 0.0001 is less than a step of .* 10 with gap = 0.1"),
        ({"step_seconds": 1e-6}, "steps of islands to simulate, more than"),
        ({"step_seconds": 1e-320}, "step_seconds = 1e-320; .* at least 1e-06"),
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
def test_bad_numbers_of_extra_islands_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        simulate_scavenge(ScavengeConfig(**fields))
