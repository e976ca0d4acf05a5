"""`diloco simulate`: what programs read and what people see; the formula of bandwidth
against figures that can be worked out by hand."""

import dataclasses
import json
import math

import pytest

from diloco_jax.cli import main
from diloco_jax.config import ConfigError
from diloco_jax.config.fields import LARGEST
from diloco_jax.simulation import goodput
from diloco_jax.simulation.bandwidth import (
    OVERLAP,
    PUBLISHED_DECOUPLED_GBIT_PER_S,
    UTILISATION,
    BandwidthConfig,
    simulate_bandwidth,
)
from diloco_jax.simulation.fleet import GBIT_PER_S, PARAMS, STEP_SECONDS

QUICK = ["--hours", "0.2", "--seeds", "2", "--islands", "2", "--chips", "3e5"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["simulate", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_goodput_as_json_has_every_measure_with_bounds(capsys):
    options = [
        *("--mtbi-years", "2", "--slice-chips", "1000", "--down-seconds", "1"),
        *("--up-seconds", "1", "--return-seconds", "1", "--step-seconds", "10"),
        *("--quorum", "2", "--grace", "0.5", "--seed", "3"),
        *("--method", "decoupled", "--json"),
    ]
    code, out, _ = run(capsys, "goodput", *QUICK, *options)
    result = json.loads(out)
    assert code == 0
    for name in goodput.FORMS:
        low, high = result["bounds"][name]
        assert low <= result[name] <= high
    assert result["config"]["chips"] == 300_000
    assert len(result["samples"]) == 2


def test_without_json_nothing_goes_to_standard_output(capsys):
    code, out, err = run(capsys, "goodput", "--method", "elastic")
    assert (code, out) == (0, "")
    assert "published 58%" in err


def test_bandwidth_has_its_stated_keys(capsys):
    arguments = ["--params", "7e9", "--sites", "8", "--step-seconds", "1"]
    arguments += ["--cycle", "100", "--fragments", "10", "--overlap", "5"]
    code, out, _ = run(capsys, "bandwidth", *arguments, "--codec", "int4", "--json")
    result = json.loads(out)
    assert code == 0
    assert round(result["data_parallel_gbit_per_s"]) == 198
    assert result["decoupled_gbit_per_s"] < result["peak_gbit_per_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["goodput", "--chips", "-5"], "chips = -5"),
        (["bandwidth", "--overlap", "inf"], "overlap = inf; it must be finite"),
        (
            ["goodput", "--fragments", "1000", "--cycle", "1", "--hours", "0.1"],
            "pairs of 2.9e+05 deltas and fragments = 1000 to simulate, more than 1e+08;"
            " lower fragments or hours, or raise cycle or step_seconds",
        ),
        (["gooput"], "did you mean 'goodput'"),
    ],
)
def test_bad_input_ends_with_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err


PLAIN = BandwidthConfig(
    params=1e9, cycle=10, codec="bf16", step_seconds=2, link_utilisation=1
)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BandwidthConfig(), {"data_parallel_gbit_per_s": 196.0 / 0.99}),
        (BandwidthConfig(codec="int4"), {"bytes_per_parameter": 0.5 + 2 / 32}),
        (BandwidthConfig(codec="int8"), {"bytes_per_parameter": 1 + 2 / 256}),
        # Two bits need no more than the 0.84 that was published.
        (
            BandwidthConfig(codec="int2"),
            {"bytes_per_parameter": 0.25 + 2 / 32, "decoupled_gbit_per_s": 0.737},
        ),
        # Every parameter once in a cycle of 20 s.
        (PLAIN, {"decoupled_gbit_per_s": 0.8, "coordinator_gbit_per_s": 6.4}),
        # 1.6 Gbit in two of the four steps of 2 s.
        (
            dataclasses.replace(PLAIN, cycle=100, fragments=10, overlap=4),
            {"peak_gbit_per_s": 0.4},
        ),
        (
            dataclasses.replace(PLAIN, fragments=10, overlap=40),
            {"peak_gbit_per_s": 0.8},
        ),
        # Data-parallel: 16 Gbit a step. Decoupled: 1 Gbit a step.
        (
            dataclasses.replace(PLAIN, sites=2, cycle=16, link_gbit_per_s=1),
            {"data_parallel_step_seconds": 18, "decoupled_step_seconds": 2},
        ),
        (
            dataclasses.replace(PLAIN, sites=2, cycle=16, link_gbit_per_s=0.25),
            {"data_parallel_step_seconds": 66, "decoupled_step_seconds": 4},
        ),
    ],
)
def test_figures_are_those_worked_out_by_hand(config, expected):
    result = simulate_bandwidth(config)
    for name, value in expected.items():
        assert getattr(result, name) == pytest.approx(value, rel=1e-3), name
    ratio = result.data_parallel_step_seconds / result.decoupled_step_seconds
    assert result.speedup == ratio


@pytest.mark.parametrize("codec", ["int4", "int8", "bf16"])
def test_the_published_rate_comes_out_at_the_cycle_that_is_shown(codec):
    config = BandwidthConfig(codec=codec, cycle=1000)
    shown = simulate_bandwidth(config)
    ratio = shown.published_at_cycle / config.cycle
    used = dataclasses.replace(config, link_utilisation=shown.published_at_utilisation)
    for rate in (
        shown.decoupled_gbit_per_s / ratio,
        simulate_bandwidth(used).decoupled_gbit_per_s,
    ):
        assert rate == pytest.approx(PUBLISHED_DECOUPLED_GBIT_PER_S)


def test_the_formula_is_printed_with_its_terms():
    text = "\n".join(simulate_bandwidth(BandwidthConfig()).formulas())
    for term in ("2 (8 - 1) / 8", "7e+09", "198 Gbit/s", "24 steps", "int8", "0.84"):
        assert term in text
    assert "gives it with a cycle of" in text
    other = "\n".join(simulate_bandwidth(BandwidthConfig(sites=4)).formulas())
    assert "gives it with a cycle of" not in other


@pytest.mark.parametrize("link", [2.0, 5.0])
def test_twelve_billion_over_four_regions_is_as_fast_as_published(link):
    """For steps of up to 3 s at 5 Gbit/s, which is what the formula gives 20 for."""
    config = BandwidthConfig(
        params=12e9, sites=4, step_seconds=3, codec="int4", link_gbit_per_s=link
    )
    result = simulate_bandwidth(config)
    assert result.speedup > 20
    assert result.decoupled_step_seconds == 3, "the link carries it"
    assert "(published: more than 20)" in result.formulas()[4]
    other = dataclasses.replace(config, link_gbit_per_s=100)
    assert "(published" not in simulate_bandwidth(other).formulas()[4]


@pytest.mark.parametrize("bound", ["low", "high"])
def test_at_the_bounds_every_result_is_finite(bound):
    low = bound == "low"
    config = BandwidthConfig(
        params=1 if low else PARAMS.high,
        fragments=1,
        sites=LARGEST,
        cycle=1 if low else LARGEST,
        step_seconds=getattr(STEP_SECONDS, bound),
        overlap=getattr(OVERLAP, bound),
        link_utilisation=getattr(UTILISATION, bound),
        link_gbit_per_s=getattr(GBIT_PER_S, bound),
    )
    result = simulate_bandwidth(config)
    assert math.isfinite(result.speedup)
    numbers = dataclasses.asdict(result)
    del numbers["config"]
    assert all(map(math.isfinite, numbers.values())), numbers


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params": -1}, r"params = -1; .* above 0"),
        ({"params": 1e308}, r"params = 1e\+308; .* at most 1e\+15"),
        ({"sites": 0}, r"sites = 0; .* at least 1"),
        ({"overlap": 0}, r"overlap = 0; .* at least 1e-06"),
        ({"step_seconds": 1e-320}, r"step_seconds = 1e-320; .* at least 1e-06"),
        ({"link_gbit_per_s": 1e-320}, r"link_gbit_per_s = 1e-320; .* at least 1e-06"),
        ({"params": 3, "fragments": 24}, r"fragments = 24, but params = 3"),
        ({"link_utilisation": 1.5}, r"link_utilisation = 1.5; .* at most 1"),
    ],
)
def test_bad_terms_are_refused_by_name(fields, message):
    with pytest.raises(ConfigError, match=message):
        simulate_bandwidth(BandwidthConfig(**fields))
