"""The outer optimizer of a run whose config leaves it open."""

from typing import Any

import pytest

from diloco_jax.config.resolving import preset
from diloco_jax.config.run import OuterConfig

LONG: dict[str, Any] = {
    "merges_per_fragment": 200.0,
    "steps_per_cycle": 24,
    "islands": 8,
    "keeps_length": False,
    "inner": "adamw",
}


def chosen(**run: Any) -> tuple[str | None, float | None, float | None]:
    """The preset fills the settings that an outer optimizer leaves open."""
    filled = OuterConfig(warmup_merges=3).filled(preset(**run))
    assert filled.warmup_merges == 3
    assert not filled.is_open
    return filled.optimizer, filled.learning_rate, filled.momentum


@pytest.mark.parametrize(
    ("merges", "cycle", "expected"),
    [
        (79.9, 24, ("sgd", 1.0, 0.0)),
        (79.9, 500, ("sgd", 1.0, 0.0)),
        (80.0, 24, ("nesterov", 0.4, 0.6)),
        (199.9, 24, ("nesterov", 0.4, 0.6)),
        (1e6, 23, ("nesterov", 0.4, 0.6)),
        (200.0, 24, ("nesterov", 0.8, 0.9)),
    ],
)
def test_more_merges_and_longer_cycles_have_more_momentum(
    merges: float, cycle: int, expected: tuple[str, float, float]
) -> None:
    run = {**LONG, "merges_per_fragment": merges, "steps_per_cycle": cycle}
    assert chosen(**run) == expected


@pytest.mark.parametrize(
    ("islands", "rate"), [(1, 0.4), (2, 0.6), (4, 0.6), (5, 0.8), (99, 0.8)]
)
def test_the_rate_follows_the_length_of_a_mean(islands: int, rate: float) -> None:
    assert chosen(**{**LONG, "islands": islands}) == ("nesterov", rate, 0.9)


@pytest.mark.parametrize("islands", [1, 8, 99])
def test_what_is_as_long_as_one_delta_goes_no_further(islands: int) -> None:
    run = {**LONG, "merges_per_fragment": 1e6, "keeps_length": True, "islands": islands}
    assert chosen(**run) == ("nesterov", 0.4, 0.6)


@pytest.mark.parametrize(
    ("merges", "expected"),
    [(159.9, ("sgd", 1.0, 0.0)), (160.0, ("nesterov", 0.4, 0.6))],
)
def test_with_muon_inside_momentum_needs_more_merges(
    merges: float, expected: tuple[str, float, float]
) -> None:
    run = {**LONG, "merges_per_fragment": merges, "inner": "muon"}
    assert chosen(**run) == expected
