"""`diloco plan` as people meet it: refusals, tables, JSON and exit codes."""

import dataclasses
import importlib.metadata
import importlib.util
import json

import jax
import plan_support
import pytest
from plan_support import CONFIG, GB, HBM

from diloco_jax import cli
from diloco_jax.before_jax import prepare_island
from diloco_jax.config import ConfigError
from diloco_jax.config.loading import write_config_json
from diloco_jax.planning import command, compiling
from diloco_jax.planning import plan as planning

FLOPS = {"big": 16 * 918e12, "small": 4 * 459e12}


@pytest.fixture
def command_line(tmp_path, monkeypatch):
    """Runs `diloco plan` of a config, as if libtpu were there, or not."""

    def plan(config, *options, libtpu=True):
        found = "here" if libtpu else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
        monkeypatch.setattr(command.metadata, "version", lambda name: "1.2.3")
        write_config_json(config, tmp_path / "two.json")
        return cli.main(["plan", str(tmp_path / "two.json"), *options])

    return plan


@pytest.fixture
def plan(command_line, monkeypatch):
    """Plans a config with islands that a compiler is supposed to have seen."""

    def plan(config, *options, libtpu=True, **compiled):
        asked = []

        def compile_islands(config, report):
            asked.extend(config.islands)
            return {name: dataclasses.asdict(made) for name, made in compiled.items()}

        monkeypatch.setattr(command, "compile_islands", compile_islands)
        return command_line(config, *options, libtpu=libtpu), asked

    return plan


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--islands.small.topology=", "islands.small.topology is empty: name the sl"),
        ("--sync.fragments=10000", "sync.fragments = 10000"),
        ("--mtbi-years=-1", "mtbi_years = -1.0; it must be at least 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_compiled(plan, capsys, options, said):
    code, asked = plan(CONFIG, options)
    assert (code, asked) == (2, [])
    assert said in capsys.readouterr().err


def test_tpus_of_this_machine_are_left_alone(plan, monkeypatch):
    before, platforms = jax.config.jax_platforms, []

    def fragments_of(config):
        platforms.append(jax.config.jax_platforms)
        raise ConfigError("seen")

    monkeypatch.setattr(planning, "fragments_of", fragments_of)
    jax.config.update("jax_platforms", "")
    try:
        assert plan(CONFIG) == (2, [])
    finally:
        jax.config.update("jax_platforms", before)
    assert platforms == ["cpu"]


def test_without_libtpu_it_says_how_to_get_it(plan, capsys):
    code, asked = plan(CONFIG, libtpu=False)
    assert (code, asked) == (2, [])
    assert "pip install -e '.[tpu]'" in capsys.readouterr().err


def test_json_is_all_of_it_on_standard_output(plan, capsys):
    made = {
        name: plan_support.island(CONFIG.islands[name].topology, flops=flops)
        for name, flops in FLOPS.items()
    }
    code, asked = plan(CONFIG, "--json", **made)
    assert (code, asked) == (0, ["big", "small"])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["islands"]["big"]["compiled"]["hbm"]["parameters"] == 2 * GB
    assert found["run"]["coordinator"]["cores"] > 0
    assert 0.9 < found["run"]["goodput"]["goodput"] <= 1
    assert found["versions"] == dict.fromkeys(("diloco-jax", "jax", "libtpu"), "1.2.3")


def test_what_does_not_fit_is_shown_with_by_how_much_and_ends_with_2(plan, capsys):
    full = dataclasses.replace(HBM, used=33 * GB, missing=3 * GB, temporaries=None)
    made = {
        "big": plan_support.island("v6e:4x4", flops=FLOPS["big"], hbm=full),
        "small": plan_support.island("v5p:2x2x1", flops=FLOPS["small"]),
    }
    code, asked = plan(CONFIG, **made)
    shown = capsys.readouterr()
    assert code == 2
    assert shown.out == ""
    assert "NO, 3.00 GB missing" in shown.err
    assert "try islands.big.remat = 'full', or " in shown.err.replace("\n", " ")
    assert asked == ["big", "small"]


# ---- processes -------------------------------------------------------------------


@pytest.fixture
def worker(monkeypatch, tmp_path):
    """Puts another program in the place of the worker."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(compiling, "WORKER", "fake_worker")
    return (tmp_path / "fake_worker.py").write_text


SAYS = """
import json, os, sys
name = sys.argv[2]
print(json.dumps({"done": 0.25}), flush=True)
flags = os.environ.get("LIBTPU_INIT_ARGS", "")
print(json.dumps({"result": {"name": name, "flags": flags}}))
"""


def test_equal_islands_are_compiled_once_with_the_flags_of_a_run(worker):
    worker(SAYS)
    twin = dataclasses.replace(CONFIG.islands["small"], stands_for="the other one")
    config = dataclasses.replace(CONFIG, islands={**CONFIG.islands, "twin": twin})
    reports = []
    plans = compiling.compile_islands(config, lambda *told: reports.append(told))
    assert {name: plan["name"] for name, plan in plans.items()} == {
        "big": "big",
        "small": "small",
        "twin": "small",
    }
    for name, island in config.islands.items():
        prepare_island(island, environment := {})
        assert plans[name]["flags"] == environment.get("LIBTPU_INIT_ARGS", "")
    assert ("big", 0.25) in reports
    assert ("small", 1.0) in reports


FAILS = """
import os, signal, sys, time
if sys.argv[2] == "small":
    print("the compiler is unhappy", file=sys.stderr, flush=True)
    {end}
time.sleep(200)
"""


@pytest.mark.parametrize(
    ("end", "exit_code", "said"),
    [
        ("sys.exit(1)", 2, "island small for v5p:2x2x1 ended with code 1"),
        ("os.abort()", 2, "island small for v5p:2x2x1 ended with code -6"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "island small was killed"),
    ],
)
def test_a_compiler_that_fails_ends_the_others_and_is_quoted(
    worker, command_line, monkeypatch, capsys, end, exit_code, said
):
    worker(FAILS.format(end=end))
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_mine=1")
    assert command_line(CONFIG) == exit_code
    told = capsys.readouterr().err
    assert said in told
    assert "the compiler is unhappy" in told
    if exit_code == 2:
        assert "LIBTPU_INIT_ARGS = '--xla_mine=1" in told


def test_a_config_error_of_the_compiler_is_one(worker, command_line, capsys):
    worker('import json; print(json.dumps({"config_error": "attention = 7"}))')
    assert command_line(CONFIG) == 2
    assert "attention = 7" in capsys.readouterr().err
