"""Cycle and outer optimizer of a run whose config leaves them open."""

from typing import Any

import pytest

from diloco_jax import Config, ConfigError, IslandConfig
from diloco_jax.config.resolving import cycle, filled, is_open, preset, resolve_open
from diloco_jax.config.run import OuterConfig, SyncConfig

LONG: dict[str, Any] = {
    "merges_per_fragment": 200.0,
    "steps_per_cycle": 24,
    "islands": 8,
    "keeps_length": False,
    "inner": "adamw",
}
SHORT, GENTLE = ("sgd", 1.0, 0.0), ("nesterov", 0.4, 0.6)
FOREVER = {"merges_per_fragment": 1e6}


def merges(number: float, **others: Any) -> dict[str, Any]:
    return {"merges_per_fragment": number, **others}


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        # More merges and longer cycles have more momentum.
        (merges(79.9), SHORT),
        (merges(79.9, steps_per_cycle=500), SHORT),
        (merges(399.9, steps_per_cycle=4), SHORT),
        (merges(400.0, steps_per_cycle=4), GENTLE),
        (FOREVER | {"steps_per_cycle": 3}, SHORT),
        (merges(80.0), GENTLE),
        (merges(199.9), GENTLE),
        (FOREVER | {"steps_per_cycle": 23}, GENTLE),
        # The rate follows the length of a mean.
        *(
            ({"islands": islands}, ("nesterov", rate, 0.9))
            for islands, rate in ((1, 0.4), (2, 0.6), (4, 0.6), (5, 0.8), (99, 0.8))
        ),
        # What is as long as one delta goes no further.
        *(
            (FOREVER | {"keeps_length": True, "islands": islands}, GENTLE)
            for islands in (1, 8, 99)
        ),
        # With Muon inside, momentum needs more merges.
        (merges(159.9, inner="muon"), SHORT),
        (merges(160.0, inner="muon"), GENTLE),
        # It would carry a run away from trained weights.
        (FOREVER | {"from_weights": True}, SHORT),
    ],
)
def test_the_preset_fills_what_an_outer_optimizer_leaves_open(
    run: dict[str, Any], expected: tuple[str, float, float]
) -> None:
    outer = filled(OuterConfig(warmup_merges=3), preset(**{**LONG, **run}))
    assert outer.warmup_merges == 3
    assert not is_open(outer)
    assert (outer.optimizer, outer.learning_rate, outer.momentum) == expected


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


def test_an_islands_name_may_have_dots() -> None:
    config = Config(islands={"a": IslandConfig(), "a.b": IslandConfig()})
    changed = config.replace("islands.a.b.batch_size", 4).islands
    assert [island.batch_size for island in changed.values()] == [8, 4]
