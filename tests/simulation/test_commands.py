"""`diloco simulate`: what programs read and what people see."""

import json
import os
import signal

import pytest
from interruption import until_it_is_raised

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
        *("--step-spread", "0.1", "--quorum", "2", "--grace", "0.5", "--seed", "3"),
        *("--method", "decoupled", "--json"),
    ]
    code, out, _ = run(capsys, "goodput", *QUICK, *options)
    result = json.loads(out)
    assert code == 0
    for name in goodput.MEASURES:
        low, high = result["bounds"][name]
        assert low <= result[name] <= high
    assert result["config"]["chips"] == 300_000
    assert len(result["samples"]) == 2


def test_without_json_nothing_goes_to_standard_output(capsys):
    code, out, err = run(capsys, "goodput", "--method", "elastic")
    assert (code, out) == (0, "")
    assert "published 58%" in err


def test_a_sweep_writes_table_and_plot(capsys, tmp_path, monkeypatch):
    folder = tmp_path / "o[" / "x]"
    folder.mkdir(parents=True)
    monkeypatch.setattr("diloco_jax.simulation.goodput.CHIPS", (100_000,))
    monkeypatch.setattr("diloco_jax.simulation.goodput.ISLANDS", (1,))
    arguments = ["--sweep", "--out", str(folder), "--hours", "0.1", "--json"]
    code, out, err = run(capsys, "goodput", *arguments)
    assert code == 0
    assert len(json.loads(out)["points"]) == 3
    assert {p.name for p in folder.iterdir()} == {"goodput.csv", "goodput.png"}
    assert f"written: {folder}/goodput.csv" in err.replace("\n", "")


def test_ctrl_c_in_a_sweep_shows_the_points_that_are_done(
    capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("diloco_jax.simulation.goodput.CHIPS", (100_000,))
    done, simulate = [], goodput.simulate_goodput

    def simulated(config, progress):
        if len(done) == 2:
            os.kill(os.getpid(), signal.SIGINT)
            until_it_is_raised()
        done.append(simulate(config, progress))
        return done[-1]

    monkeypatch.setattr(goodput, "simulate_goodput", simulated)
    arguments = ["--sweep", "--out", str(tmp_path), "--hours", "0.1", "--json"]
    code, out, err = run(capsys, "goodput", *arguments)
    assert code == 1
    assert len(json.loads(out)["points"]) == 2
    assert "2 of 7 points are done; no file is written\nerror: interrupted" in err
    assert not list(tmp_path.iterdir())


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
        (["goodput", "--sweep", "--out", "/proc"], "/proc: no file can be made there"),
        (["goodput", "--sweep", "--out", "/no/where"], "/no/where is not a folder"),
        (
            ["goodput", "--out", "/tmp"],
            "--out /tmp without --sweep, which alone writes files; add --sweep or",
        ),
        (
            ["goodput", "--sweep", "--method", "rigid"],
            "--method rigid with --sweep, which goes over method decoupled, elastic",
        ),
        (
            ["goodput", "--sweep", "--islands", "4"],
            "--islands 4 with --sweep, which goes over islands 1, 2, 4, 8, 16; leave",
        ),
    ],
)
def test_bad_input_ends_with_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
