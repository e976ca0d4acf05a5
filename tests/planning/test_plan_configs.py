"""The configs that are planned can be launched as they are."""

from pathlib import Path

import pytest
from config_support import load_config

from diloco_jax import cli
from diloco_jax.hardware.tpus import slice_of
from diloco_jax.planning.options import Assumptions, PlanOptions
from diloco_jax.planning.plan import fragments_of
from diloco_jax.simulation.fleet import ExchangeTerms, FailureModel

CONFIGS = Path(__file__).parents[2] / "configs"
CLOUD = ("--launch.project", "some-project", "--launch.image", "r.example/image:1")
OPTIONS = {
    "sky": (
        *("--launch.coordinator-zone", "us-east5-b"),
        *("--launch.coordinator-address", "c.example", "--launch.dns-zone", "z"),
    ),
    "gke": (
        *("--launch.coordinator-zone", "us-east5-b"),
        *("--launch.cluster", "c", "--launch.location", "us-east5"),
    ),
}


def launch(name, on, tmp_path):
    path = str(CONFIGS / f"{name}.py")
    workdir = ("--workdir", str(tmp_path / "run"), "--dry-run", "--on", on)
    return cli.main(["launch", path, *workdir, *CLOUD, *OPTIONS[on]])


@pytest.mark.parametrize(
    ("name", "on"),
    [("mixed_toy", "sky"), ("mixed_toy", "gke"), ("mixed_12b", "sky")],
)
def test_a_planned_config_is_launchable(name, on, tmp_path, capsys):
    assert launch(name, on, tmp_path) == 0
    assert name.replace("_", "-") in capsys.readouterr().out


def test_slices_a_thousand_kilometres_apart_are_not_of_one_cluster(tmp_path, capsys):
    assert launch("mixed_12b", "gke", tmp_path) == 2
    assert "launch.zones.v6e = 'us-central1-b'" in capsys.readouterr().err


def test_four_regions_have_the_islands_whose_compilations_they_share():
    two = load_config(CONFIGS / "mixed_12b.py").islands
    four = load_config(CONFIGS / "four_regions.py").islands
    assert set(map(repr, four.values())) == set(map(repr, two.values()))


@pytest.mark.parametrize(
    ("name", "topologies"),
    [
        ("mixed_toy", ["v5p:2x2x1", "v6e:2x2"]),
        ("mixed_12b", ["v5p:4x4x4", "v6e:16x16"]),
    ],
)
def test_the_reference_cases_are_what_they_are_called(name, topologies):
    config = load_config(CONFIGS / f"{name}.py")
    slices = [slice_of(n, island) for n, island in config.islands.items()]
    assert [found.topology for found in slices] == topologies
    assert len(fragments_of(config).fragments) == config.run.sync.fragments


def test_assumptions_are_those_of_the_simulator_where_it_has_them():
    assert Assumptions().mtbi_years == FailureModel().mtbi_years
    assert Assumptions().link_gbit_per_s == ExchangeTerms().link_gbit_per_s
    options = PlanOptions(mtbi_years=2.0, json=True)
    assert options.assumptions == Assumptions(mtbi_years=2.0)
