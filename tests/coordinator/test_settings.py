"""The policy's settings are those of the config, under the same names; and the least
time of a sequence, from a config alone.
"""

import dataclasses

import pytest
from config_support import load_config

from diloco_jax.config import (
    Config,
    ConfigError,
    InnerConfig,
    IslandConfig,
    Placement,
    RunConfig,
    SyncConfig,
)
from diloco_jax.coordinator import settings
from diloco_jax.coordinator.settings import (
    ANY_DEVICE_FLOPS_PER_S,
    SPARE_ISLANDS,
    UNDESCRIBED,
    bulk_places,
    largest_delta,
    least_seconds,
    policy_config,
    policy_of,
    require_merging,
    room_needed,
)
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.hardware.tpus import GENERATIONS
from diloco_jax.models.flops import analytic_flops, least_flops
from diloco_jax.protocol.coordinator.steering import MOST_ADMITTED

RUN = RunConfig(
    sync=SyncConfig(
        steps_per_cycle=7,
        overlap_steps=3,
        quorum=2,
        grace=0.25,
        grace_window="overlap",
        max_staleness=4,
        partial_merges="full",
    ),
    total_tokens=99,
)
PLACEMENT = Placement(
    time_budget_s=20.0, compile_budget_s=11.0, outage_budget_s=13.0, notice_s=5.0
)


@pytest.mark.parametrize("owner", [RUN.sync, RUN, PLACEMENT, PLACEMENT.deadlines])
def test_what_has_the_same_name_has_the_same_value(owner):
    policy = policy_config(RUN, PLACEMENT, "r", (30, 10))
    own = {"fragments", "fingerprint", "parameters"}
    shared = [
        name
        for name in dir(policy)
        if not name.startswith("_") and name not in own and hasattr(owner, name)
    ]
    assert shared
    for name in shared:
        assert getattr(policy, name) == getattr(owner, name)


def test_what_no_config_says_is_as_given():
    policy = policy_config(RUN, PLACEMENT, "r", (30, 10))
    assert (policy.run_id, policy.fragment_sizes) == ("r", (30, 10))
    assert policy.fingerprint == RUN.fingerprint()
    assert policy.flush_s == 60.0


def test_room_is_counted_for_everyone_who_may_join():
    islands = {"a": IslandConfig(), "b": IslandConfig()}
    placement = Placement(admit=("b", "guest"), workers=2)
    config = Config(run=RUN, islands=islands, placement=placement)
    plan = plan_fragments({"x": (4, 30)}, {"x": ("layers", "embed")}, 4)
    policy = policy_of(config, plan, "r")
    assert policy.room_each == 2 * largest_delta(config, plan) > 0
    assert room_needed(config, plan) == 3 * policy.room_each
    assert policy.merge_buffer_bytes == placement.merge_buffer_bytes
    assert policy.admitted == {"guest": None, "a": 8, "b": 8}
    flops = least_flops(RUN.model, RUN.sequence_length)
    assert policy.least_seconds == least_seconds(config, flops)


def test_islands_whose_speed_nothing_bounds_are_named(caplog, monkeypatch):
    islands = {"a": IslandConfig(step_seconds=0.2), "b": IslandConfig()}
    keys = Placement(certificates="keys", admit=("guest",))
    config = Config(run=RUN, islands=islands, placement=keys)
    plan = plan_fragments({"x": (4, 30)}, {"x": ("layers", "embed")}, 4)
    policy_of(config, plan, "r")
    # As of a model of one's own whose program does not tell.
    monkeypatch.setattr(settings, "least_sequence_flops", lambda run: 0.0)
    policy_of(dataclasses.replace(config, placement=Placement()), plan, "r")
    assert "the speed of islands" not in caplog.text
    policy_of(config, plan, "r")
    assert "the speed of islands guest, b but 0.0001 s a step" in caplog.text
    assert "set islands.NAME.step_seconds" in caplog.text


def test_places_are_counted_by_host_and_a_guest_is_one():
    islands = {"big": IslandConfig(hosts=64, mesh_data=64, batch_size=64)}
    islands["small"] = IslandConfig()
    placement = Placement(admit=("small", "guest"))
    places = bulk_places(Config(islands=islands, placement=placement))
    assert places["max_hosts"] == 66 + MOST_ADMITTED + SPARE_ISLANDS
    assert places["max_hosts_each"] == 64


def test_workers_are_at_addresses():
    require_merging(Placement(workers=2, worker_addresses=("a:1", "b:1")))
    with pytest.raises(ConfigError, match=r"workers = 3, .*addresses is empty: name"):
        require_merging(Placement(workers=3))


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"warmup_fraction": 0.2}, [0.0, 0.25, 0.5, 0.325, 0.15]),
        ({"warmup_fraction": 0.0, "schedule": "constant"}, [0.5] * 5),
    ],
)
def test_decisions_know_the_course_of_the_learning_rate(changes, rates):
    inner = InnerConfig(learning_rate=0.5, final_fraction=0.3, **changes)
    policy = policy_config(dataclasses.replace(RUN, inner=inner), PLACEMENT, "r", (9,))
    found = [policy.rates[point] for point in (0, 10, 20, 60, 100)]
    assert found == pytest.approx(rates)
    assert len(policy.rates) == 101


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
    assert least["v6e"] == pytest.approx(flops / (256 * GENERATIONS["v6e"].flops_per_s))
    assert least["v5p"] == pytest.approx(flops / (64 * GENERATIONS["v5p"].flops_per_s))
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
    assert max(chip.flops_per_s for chip in GENERATIONS.values()) * 5 < (
        ANY_DEVICE_FLOPS_PER_S
    )


def test_of_a_model_that_cannot_be_counted_only_the_step_time_is_known() -> None:
    least = least_seconds(with_island(step_seconds=1024.0), 0.0)
    assert least == {"v5p": 0.0, "v6e": 2.0, UNDESCRIBED: 0.0}


def test_a_topology_that_there_is_not_is_refused_by_its_field() -> None:
    with pytest.raises(ConfigError, match=r"islands.v6e.topology"):
        least_of(with_island(topology="v6e:3x3"))
