"""Rates of a coordinator's machine, and what a plan says of them."""

from pathlib import Path

import msgspec
import pytest

from diloco_jax import cli
from diloco_jax.hardware.machines import CONSTANTS, constants_of, rate_of

CONFIG = Path(__file__).parents[2] / "configs" / "four_regions.py"


@pytest.mark.parametrize(
    ("setting", "route"), [("auto", "xla"), ("xla", "xla"), ("native", "native")]
)
def test_constants_follow_the_route_that_is_sure(setting, route, capsys):
    """A plan does not know whether there will be a compiler."""
    assert constants_of(setting).merge_route == route
    plan = ["plan", str(CONFIG), "--arithmetic", "--placement.merge_route", setting]
    assert cli.main(plan) == 0
    assert f"route {route}" in capsys.readouterr().err


def test_codecs_that_were_not_measured_count_as_the_dearest():
    some = {"f32": 0.9, "int8": 0.4}
    assert rate_of(some, "f32") == rate_of(some, "int4") == 0.9
    assert rate_of(some, "int8") == 0.4


def test_each_rate_is_shown_with_where_it_is_from(capsys):
    plan = ["plan", str(CONFIG), "--arithmetic"]
    assert cli.main(plan) == 0
    said = capsys.readouterr().err
    assert "0.73 up, 0.44 down [constant: `python benchmarks/wire.py`" in said
    assert "this plan took" in said.splitlines()[-1]
    assert cli.main([*plan, "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert found["run"]["rates"]["upload_core_seconds"] == 0.73


def test_a_rule_of_its_own_rates_has_a_line_where_it_is_used():
    assert "trimmed_mean" not in "\n".join(CONSTANTS.lines("rda"))
    told = "\n".join(CONSTANTS.lines("trimmed_mean"))
    assert "rule trimmed_mean, core seconds" in told
