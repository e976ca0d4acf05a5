"""Sweeps: every point, as CSV and as a plot."""

import csv
import dataclasses

import pytest

from diloco_jax.config import ConfigError
from diloco_jax.simulation.fleets.goodput import GoodputConfig, simulate_goodput
from diloco_jax.simulation.fleets.sweep import sweep_goodput, write_csv, write_plot


@pytest.fixture(scope="module")
def results():
    config = GoodputConfig(hours=0.1, seeds=1)
    return sweep_goodput(config, chips=(100_000, 200_000), islands=(1, 2))


def test_a_sweep_has_every_method_at_every_number_of_chips(results):
    labels = [result.config.label for result in results[:4]]
    assert labels == [
        "rigid data-parallel",
        "elastic data-parallel",
        "decoupled, 1 island",
        "decoupled, 2 islands",
    ]
    assert [r.config.chips for r in results] == [100_000] * 4 + [200_000] * 4


def test_too_few_islands_for_quorum_are_left_out():
    config = GoodputConfig(hours=0.1, seeds=1, quorum=2)
    results = sweep_goodput(config, chips=(100_000,), islands=(1, 2, 4))
    assert [(r.config.method, r.config.islands) for r in results] == [
        ("rigid", 1),
        ("elastic", 1),
        ("decoupled", 2),
        ("decoupled", 4),
    ]
    assert [r.config.quorum for r in results[2:]] == [2, 2]
    with pytest.raises(ConfigError, match="quorum = 5, but a sweep has at most 4"):
        sweep_goodput(dataclasses.replace(config, quorum=5), (100_000,), (1, 2, 4))


def test_spread_costs_one_program_as_much_as_it_does_alone():
    config = GoodputConfig(hours=0.5, seeds=1, step_spread=0.5, chips=100_000)
    results = sweep_goodput(config, chips=(100_000,), islands=(1, 2))
    for result in results[:2]:
        method = result.config.method
        alone = dataclasses.replace(config, method=method, islands=2)
        assert result.mean == simulate_goodput(alone).mean
        assert result.mean.compute_goodput < 0.85


def test_the_csv_has_a_line_per_point_with_bounds(results, tmp_path):
    write_csv(results, tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(results)
    assert float(rows[0]["goodput"]) == results[0].mean.goodput
    assert float(rows[3]["uptime_low"]) == results[3].low.uptime
    assert rows[3]["method"] == "decoupled"
    assert rows[3]["islands"] == "2"


def test_the_plot_is_a_png(results, tmp_path):
    write_plot(results, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
