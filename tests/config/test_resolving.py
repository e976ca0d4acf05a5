"""Cycle and outer optimizer of a run whose config leaves them open."""

from typing import Any

import pytest

from diloco_jax import Config, ConfigError
from diloco_jax.config.resolving import cycle, filled, is_open, preset, resolve_open
from diloco_jax.config.run import OuterConfig, SyncConfig

LONG: dict[str, Any] = {
    "merges_per_fragment": 200.0,
    "steps_per_cycle": 24,
    "islands": 8,
    "keeps_length": False,
    "inner": "adamw",
}


def chosen(**run: Any) -> tuple[str | None, float | None, float | None]:
    """The preset fills the settings that an outer optimizer leaves open."""
    outer = filled(OuterConfig(warmup_merges=3), preset(**run))
    assert outer.warmup_merges == 3
    assert not is_open(outer)
    return outer.optimizer, outer.learning_rate, outer.momentum


@pytest.mark.parametrize(
    ("merges", "cycle", "expected"),
    [
        (79.9, 24, ("sgd", 1.0, 0.0)),
        (79.9, 500, ("sgd", 1.0, 0.0)),
        (399.9, 4, ("sgd", 1.0, 0.0)),
        (400.0, 4, ("nesterov", 0.4, 0.6)),
        (1e6, 3, ("sgd", 1.0, 0.0)),
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


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        *((1, (4, 1)), (2_000, (4, 1)), (2_001, (5, 1)), (5_500, (11, 1))),
        *((5_501, (12, 2)), (11_500, (23, 2)), (11_501, (24, 2)), (1e7, (24, 2))),
    ],
)
def test_a_run_that_is_shorter_merges_more_often(
    steps: float, expected: tuple[int, int]
) -> None:
    chosen = cycle(steps)
    assert (chosen.cycle, chosen.overlap) == expected
    # Trained weights move little, however short the run is.
    assert cycle(steps, from_weights=True).cycle == 24


def test_what_a_config_says_of_its_cycle_stays() -> None:
    def resolved(**sync: int) -> SyncConfig:
        config = Config().replace({"total_tokens": 128 * 8 * 1000})
        config = config.replace({f"sync.{name}": value for name, value in sync.items()})
        return resolve_open(config).run.sync

    assert (resolved().cycle, resolved().overlap) == (4, 1)
    # A cycle of one's own has the usual overlap.
    assert resolved(steps_per_cycle=6).overlap == 2
    # A take is over before the next one of its fragment.
    assert resolved(overlap_steps=3) == SyncConfig(steps_per_cycle=6, overlap_steps=3)
    assert not is_open(resolved())
    with pytest.raises(ConfigError, match=r"sync.steps_per_cycle = None: .*; set it"):
        Config().merges_per_fragment()
