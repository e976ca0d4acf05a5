"""`diloco simulate`: what programs read and what people see."""

import json

import pytest

from diloco_jax.cli import main
from diloco_jax.simulation import goodput

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
