"""The least time of a sequence, from a config alone."""

import dataclasses

import pytest
from config_support import load_config

from diloco_jax.config import Config, ConfigError
from diloco_jax.coordinator.settings import (
    ANY_DEVICE_FLOPS_PER_S,
    UNDESCRIBED,
    least_seconds,
)
from diloco_jax.hardware.chips import CHIPS
from diloco_jax.models.flops import analytic_flops, least_flops


def config() -> Config:
    return load_config("configs/mixed_12b.py")


def with_island(**changes: object) -> Config:
    given = config()
    island = dataclasses.replace(given.islands["v6e"], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(given, islands={**given.islands, "v6e": island})


def least_of(given: Config) -> dict[str, float]:
    flops = least_flops(given.run.model, given.run.sequence_length)
    return least_seconds(given, flops)


def test_a_step_takes_its_flops_at_the_peak_of_its_chips() -> None:
    given = config()
    flops = least_flops(given.run.model, 4096)
    least = least_seconds(given, flops)
    assert least["v6e"] == pytest.approx(flops / (256 * CHIPS["v6e"].flops_per_s))
    assert least["v5p"] == pytest.approx(flops / (64 * CHIPS["v5p"].flops_per_s))
    assert 0.62 < 512 * least["v6e"] < 0.64
    assert 0 < least[UNDESCRIBED] < least["v6e"] / 10


def test_attention_and_gradients_of_frozen_weights_may_be_left_out() -> None:
    model = config().run.model
    products = least_flops(model, 4096)
    assert products < analytic_flops(model, 4096) < 1.2 * products
    assert least_flops(model, 8192) == 2 * products
    adapted = dataclasses.replace(model, lora_rank=8)
    assert least_flops(adapted, 4096) == pytest.approx(products * 2 / 3)


def test_the_emulated_step_time_counts_if_it_is_longer() -> None:
    assert least_of(with_island(step_seconds=1024.0))["v6e"] == 2.0
    least = least_of(config())["v6e"]
    assert least_of(with_island(step_seconds=1e-3))["v6e"] == least


def test_without_a_topology_each_device_is_faster_than_any() -> None:
    least = least_of(with_island(topology=""))["v6e"]
    assert 0 < least < least_of(config())["v6e"] / 5
    assert max(chip.flops_per_s for chip in CHIPS.values()) * 5 < (
        ANY_DEVICE_FLOPS_PER_S
    )


def test_of_a_model_that_cannot_be_counted_only_the_step_time_is_known() -> None:
    least = least_seconds(with_island(step_seconds=1024.0), 0.0)
    assert least == {"v5p": 0.0, "v6e": 2.0, UNDESCRIBED: 0.0}


def test_a_topology_that_there_is_not_is_refused_by_its_field() -> None:
    with pytest.raises(ConfigError, match=r"islands.v6e.topology"):
        least_of(with_island(topology="v6e:3x3"))
