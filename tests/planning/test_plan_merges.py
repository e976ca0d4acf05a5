"""Merges cost what their rule costs, and a plan refuses a cycle that they outlast."""

import dataclasses
import json

import msgspec
import pytest
from plan_support import ROOT, shipped
from rich.console import Console

from diloco_jax import cli
from diloco_jax.hardware.machines import (
    CONSTANTS,
    NATIVE,
    RuleRates,
    rate_of,
)
from diloco_jax.planning import terms as terms_module
from diloco_jax.planning.checks import needs_of, refusals
from diloco_jax.planning.command import render
from diloco_jax.planning.coordinator import plan_merges
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.plan import plan_run

RAW = ROOT / "docs" / "results" / "raw"
OWN = """
from diloco_jax.core.families import Elementwise


class First(Elementwise):
    embeddings_by_mean = True

    def merge(self, deltas, weights, share):
        return share * deltas[0]


FIRST = First()
"""


@pytest.fixture(scope="module")
def terms():
    """12 B parameters and 64 islands, by the route "native"."""
    mixed = shipped("mixed_12b").changed({"merge_route": "native"})
    return among(mixed, 64)


def among(terms, islands):
    """The same terms with so many islands."""
    names = [f"island-{i:02}" for i in range(islands)]
    return dataclasses.replace(
        terms,
        hosts=dict.fromkeys(names, 1),
        step_seconds=dict.fromkeys(names, 0.95),
    )


@pytest.fixture
def own(tmp_path):
    """Return the name of a rule that is not in the package."""
    path = tmp_path / "own_rule.py"
    path.write_text(OWN)
    return f"{path}:FIRST"


def merging(terms):
    return [refusal for refusal in refusals(terms) if refusal.check == "merging"]


# ---- rates -----------------------------------------------------------------------


def measured():
    raw = json.loads((RAW / "merging_xeon.json").read_bytes())
    return [*raw["time"], *raw["beyond"]]


@pytest.mark.parametrize("row", measured(), ids=lambda row: row["merge"])
def test_the_constants_are_those_of_the_page(terms, row):
    """Those of the slower of two machines, which promise less."""
    change = {"sync.merge": row["merge"], "merge_route": row["route"]}
    change |= dict.fromkeys(("sync.codec_up", "sync.codec_down"), row["codec"])
    found = plan_merges(among(terms, row["islands"]).changed(change))
    assert found.known
    assert 0.75 < found.core_seconds / row["seconds_per_1e9_parameters"] < 1.33


@pytest.mark.parametrize(
    ("way", "constant"),
    [
        ("upload", CONSTANTS.upload_core_seconds),
        ("fetch", CONSTANTS.fetch_core_seconds),
    ],
)
def test_the_constants_of_the_wire_are_those_of_its_page(way, constant):
    checks = json.loads((RAW / "wire.json").read_bytes())["checks"]
    what = f"{way}, tls: core s per GB, coordinator, median"
    (row,) = (check for check in checks if check["what"] == what)
    assert 0.75 < constant / float(row["measured"]) < 1.33


def test_a_rule_costs_its_points_and_a_power_between_them():
    rates = RuleRates(beyond_core_seconds=((2, 1.0), (8, 16.0)), rule_from="here")
    assert rates.beyond(2) == pytest.approx(1.0)
    assert rates.beyond(4) == pytest.approx(4.0)
    assert rates.beyond(8) == pytest.approx(16.0)
    assert rates.beyond(16) == pytest.approx(64.0)
    assert rates.beyond(1) == 1.0


# ---- plans -----------------------------------------------------------------------


def test_weighted_sums_cost_alike_and_a_sort_costs_more(terms):
    plans = {
        rule: plan_merges(terms.changed({"sync.merge": rule}))
        for rule in ("rda", "mean", "clipped_mean", "trimmed_mean")
    }
    sorted_, cheap = plans.pop("trimmed_mean"), plans["rda"]
    assert {made.core_seconds for made in plans.values()} == {cheap.core_seconds}
    assert sorted_.fragment_core_seconds > 6 * cheap.fragment_core_seconds
    assert sorted_.share > 1 > cheap.share


def test_a_rule_that_outlasts_the_cycle_is_refused(terms):
    assert merging(terms) == []
    sorting = terms.changed({"sync.merge": "trimmed_mean"})
    (found,) = merging(sorting)
    merges = plan_merges(sorting)
    assert f"merges of a cycle take {merges.seconds:.3g} s on 16 cores" in found.text
    assert f"a cycle {sorting.cycle_seconds:.3g} s" in found.text
    assert "a weighted sum such as rda takes " in found.text
    assert "placement.workers" in found.change
    assert merging(sorting.changed(found.change)) == []


def test_a_longer_cycle_helps_where_workers_do_not(terms, monkeypatch):
    """One worker for each fragment is the most."""
    slow = msgspec.structs.replace(
        NATIVE.rules["trimmed_mean"], beyond_core_seconds=((2, 1e5), (64, 2e5))
    )
    rates = msgspec.structs.replace(NATIVE, rules={"trimmed_mean": slow})
    monkeypatch.setattr(terms_module, "constants_of", lambda route: rates)
    sorting = terms.changed({"sync.merge": "trimmed_mean"})
    (found,) = merging(sorting)
    assert set(found.change) == {"sync.steps_per_cycle"}
    assert merging(sorting.changed(found.change)) == []


def test_the_route_with_a_compiler_is_proposed_first(terms):
    (found,) = merging(terms.changed({"placement.merge_route": "auto"}))
    assert "the merge route 'xla'" in found.text
    assert found.change == {"placement.merge_route": "native"}


def test_workers_divide_the_merges(terms):
    few = {"launch.coordinator_machine": "n2-highmem-2"}
    alone, small = (plan_merges(terms.changed(change)) for change in ({}, few))
    of_four = plan_merges(terms.changed({"workers": 4}))
    assert (alone.cores, of_four.cores, small.cores) == (16, 16, 2)
    # They make digests of anchors, too.
    assert of_four.seconds == pytest.approx(alone.seconds / 4, rel=0.1)
    assert small.share == pytest.approx(small.seconds / terms.cycle_seconds)


# ---- rules of one's own ----------------------------------------------------------


def test_a_rule_that_nobody_measured_is_said_to_be_one(own, terms):
    config = terms.changed({"sync.merge": own}).config
    console = Console(record=True, width=500)
    plan = plan_run("x.py", config, terms.fragments, Assumptions())
    render(plan, console)
    assert "nobody measured this rule" in console.export_text()
    assert plan.fits is None
    assert plan.run.coordinator.merges.known is False
    assert merging(terms.changed({"sync.merge": own})) == []


def test_embeddings_are_merged_by_the_mean_where_the_rule_says_so(
    own, terms, monkeypatch
):
    rates = RuleRates(beyond_core_seconds=((2, 100.0), (64, 500.0)), rule_from="here")
    known = msgspec.structs.replace(NATIVE, rules={own: rates})
    monkeypatch.setattr(terms_module, "constants_of", lambda route: known)
    mine = terms.changed({"sync.merge": own})
    (found,) = merging(mine)
    assert own in found.text
    cost = needs_of(mine).coordinator.merges
    pieces = terms.fragments.pieces
    part = sum(p.size for p in pieces if not p.embedding) / terms.fragments.total
    assert 0 < part < 1
    assert cost.core_seconds - cost.of_weighted_sum == pytest.approx(500 * part)


# ---- what a plan says of rates -----------------------------------------------------


def test_codecs_that_were_not_measured_count_as_the_dearest():
    some = {"f32": 0.9, "int8": 0.4}
    assert rate_of(some, "f32") == rate_of(some, "int4") == 0.9
    assert rate_of(some, "int8") == 0.4


def test_each_rate_is_shown_with_where_it_is_from(capsys):
    path = ROOT / "configs" / "four_regions.py"
    plan = ["plan", str(path), "--arithmetic"]
    assert cli.main(plan) == 0
    said = capsys.readouterr().err
    assert "0.81 up, 0.84 down [constant: `python benchmarks/wire.py`" in said
    assert "this plan took" in said.splitlines()[-1]
    assert cli.main([*plan, "--json"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out)
    assert found["run"]["rates"]["upload_core_seconds"] == 0.81


def test_a_rule_of_its_own_rates_has_a_line_where_it_is_used():
    assert "trimmed_mean" not in "\n".join(CONSTANTS.lines("rda"))
    told = "\n".join(CONSTANTS.lines("trimmed_mean"))
    assert "rule trimmed_mean, core seconds" in told
