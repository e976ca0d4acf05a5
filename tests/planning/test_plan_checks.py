"""Plans refuse what would not run, with a change that the same arithmetic accepts."""

import dataclasses
import importlib.util
import json
import math
import re

import msgspec
import pytest
from plan_support import GB, ROOT, shipped

from diloco_jax import cli
from diloco_jax.config import ConfigError
from diloco_jax.config.placement import region_of
from diloco_jax.hardware.machines import Measurements, disk_bytes_per_s, machine_of
from diloco_jax.planning import checks
from diloco_jax.planning.advice import mended
from diloco_jax.planning.checks import least_hbm_of, needs_of, refusals
from diloco_jax.planning.compiling import open_fragments
from diloco_jax.planning.options import (
    Assumptions,
    PlanOptions,
)
from diloco_jax.planning.plan import fragments_of
from diloco_jax.simulation.bandwidth import BandwidthConfig
from diloco_jax.simulation.fleet import ExchangeTerms, FailureModel

CONFIGS = ROOT / "configs"


@pytest.fixture(scope="module")
def mixed():
    """With publishes in int8, which load the links more."""
    return shipped("mixed_12b").changed({"sync.codec_down": "int8"})


@pytest.mark.parametrize("name", ["mixed_12b", "four_regions"])
def test_the_reference_cases_pass_every_check_on_slow_links(name):
    assert refusals(shipped(name, 2.0)) == []


ONE_CHIP = {
    "islands.v6e.topology": "v6e:1x1",
    "islands.v6e.mesh_data": 1,
    "islands.v6e.mesh_fsdp": 1,
}
REFUSED = [
    (
        "HBM",
        ONE_CHIP,
        5.0,
        "without gradients and activations, and v6e:1x1 has 33.6 GB (mesh_fsdp = 1",
    ),
    ("link", {}, 0.9, "must carry 1.05 Gbit/s on average and has 0.9"),
    ("join", {"placement.time_budget_s": 10.0}, 0.05, "wait for it for 3825 s"),
    (
        "memory",
        {"launch.coordinator_machine": "n2-highmem-16"},
        5.0,
        "n2-highmem-16 has 137",
    ),
    (
        "cores",
        {"launch.coordinator_machine": "n2-highmem-2"},
        5.0,
        "needs 3 cores and n2-highmem-2 has 2",
    ),
    (
        "merging",
        {"launch.coordinator_machine": "n2-highmem-2", "sync.steps_per_cycle": 64},
        5.0,
        "on 2 cores and a cycle 60.8 s, with 2 deltas, sync.merge = 'rda', ",
    ),
    (
        "disk bytes",
        {"launch.coordinator_disk_gb": 300},
        5.0,
        "a disk of 300 GB, of",
    ),
    (
        "disk speed",
        {"launch.coordinator_disk_gb": 100, "sync.steps_per_cycle": 64},
        5.0,
        "to a disk of 100 GB, which takes 176",
    ),
    (
        "restart",
        {"placement.snapshot_every_s": 1200.0},
        5.0,
        "(placement.outage_budget_s = 60, and more",
    ),
    (
        "egress",
        {"launch.coordinator_machine": "n2-highmem-4", "sync.steps_per_cycle": 20},
        50.0,
        "n2-highmem-4 sends 10 at most",
    ),
    (
        "merge buffer",
        {"placement.merge_buffer_bytes": 10**8},
        5.0,
        "from 2 islands take 0.279 GB and placement.merge_buffer_bytes is 0.1 GB",
    ),
    (
        "merge buffer",
        {"placement.merge_buffer_bytes": 10**8, "placement.workers": 2},
        5.0,
        "take 0.279 GB in each of 2 workers and placement.merge_buffer_bytes is 0.1 GB",
    ),
]
"""(check, settings with which it refuses, Gbit/s of a link, part of its text)"""


def test_every_check_has_a_case_in_which_it_refuses(mixed):
    assert [check.name for check in checks._checks(mixed)] == [
        *(
            "HBM",
            "link",
            "egress",
            "join",
            "memory",
            "merge buffer",
            "cores",
            "merging",
        ),
        *("disk bytes", "disk speed", "restart", "places"),
    ]
    refusing = {c.name for c in checks._checks(mixed) if not c.waits}
    assert {name for name, *_ in REFUSED} == refusing


def test_what_only_waits_its_turn_is_told_and_refuses_nothing(mixed):
    """Each worker has a port of its own, with as many places."""
    crowded = mixed.changed({"placement.bulk_channels": 64})
    assert refusals(crowded) == []
    (note,) = checks.notes(crowded)
    assert (
        "may begin 10240 transfers together at its port, which has places for 4096"
        in note
    )
    (note,) = checks.notes(crowded.changed({"placement.workers": 2}))
    assert "at the port of each of 2 workers" in note
    assert checks.notes(mixed) == []


def test_workers_on_machines_of_their_own_need_only_their_share():
    terms = shipped("four_regions").changed({"placement.workers": 64})
    assert "cores" not in [refusal.check for refusal in refusals(terms)]
    plan = needs_of(terms).coordinator
    assert plan.machine_memory == max(worker.memory for worker in plan.workers)
    assert plan.machine_cores == 1
    assert plan.memory > 32 * plan.machine_memory
    # The largest worker has one fragment of 48, and some have none.
    assert plan.share_served < 1 / 16
    assert max(d.bytes_per_s for d in plan.disks) < plan.disk.bytes_per_s / 16


def test_a_disk_that_would_be_too_small_for_everything_does_for_a_share():
    """The lead has every fragment once, at the run's beginning and end, and all lines;
    workers divide the rest."""
    small = shipped("four_regions").changed({"launch.coordinator_disk_gb": 400})
    assert "disk bytes" in {r.check for r in refusals(small)}
    apart = small.changed({"placement.workers": 4})
    assert "disk bytes" not in {r.check for r in refusals(apart)}
    plan = needs_of(apart).coordinator
    lead, *workers = plan.disks
    assert (lead.log, lead.deltas, lead.snapshot_bytes_per_s) == (0, 0, 0.0)
    assert lead.lines == plan.disk.lines > sum(w.lines for w in workers) == 0
    # Each writes its share in a shorter round, so fewer publishes wait for it.
    assert 0 < sum(w.log for w in workers) < plan.disk.log
    rounds = sum(w.round_seconds for w in workers)
    assert rounds >= plan.disk.round_seconds * (1 - 1e-9)
    assert max(d.bytes for d in plan.disks) < plan.disk.bytes


def test_deltas_that_wait_on_a_small_disk_had_better_wait_in_memory():
    """A disk where deltas may wait must leave room for two snapshots besides."""
    terms = shipped("four_regions").changed({"launch.coordinator_disk_gb": 900})
    (found,) = [r for r in refusals(terms) if r.check == "disk bytes"]
    assert set(found.change) == {"placement.merge_buffer_bytes"}
    assert needs_of(terms.changed(found.change)).coordinator.disk.deltas == 0
    placement = terms.config.placement
    less = found.change["placement.merge_buffer_bytes"] - 1
    tight = terms.changed({"placement.merge_buffer_bytes": less})
    assert less > placement.merge_buffer_bytes
    assert "disk bytes" in {r.check for r in refusals(tight)}
    # Memory for all of them must be there, not only for what is planned to wait.
    full = terms.changed({"launch.coordinator_machine": "n2-highmem-16"})
    (found,) = [r for r in refusals(full) if r.check == "disk bytes"]
    assert set(found.change) == {"launch.coordinator_disk_gb"}


@pytest.mark.parametrize(("check", "change", "link", "said"), REFUSED)
def test_each_check_refuses_and_its_change_helps(mixed, check, change, link, said):
    terms = dataclasses.replace(mixed, link_gbit_per_s=link).changed(change)
    found = {refusal.check: refusal for refusal in refusals(terms)}
    assert said in found[check].text
    assert found[check].change
    after = {r.check for r in refusals(terms.changed(found[check].change))}
    assert check not in after
    assert after < set(found)


def test_a_change_that_breaks_another_check_is_not_proposed(mixed):
    """Longer rounds would do for the disk, but a restart would outlast the leases."""
    heavy = dataclasses.replace(mixed, link_gbit_per_s=50.0).changed(
        {"sync.steps_per_cycle": 20, "launch.coordinator_disk_gb": 2500}
    )
    just = math.ceil(needs_of(heavy).outage.restart_seconds)
    terms = heavy.changed({"placement.outage_budget_s": float(just)})
    (found,) = refusals(terms)
    assert found.check == "disk speed"
    assert set(found.change) == {"launch.coordinator_disk_gb"}
    longer = terms.changed({"placement.snapshot_every_s": 2000.0})
    assert "restart" in {r.check for r in refusals(longer)}


def test_what_is_short_by_little_is_not_told_as_equal(mixed):
    slow = mixed.changed({"placement.snapshot_every_s": 1200.0})
    needed = needs_of(slow).outage.restart_seconds
    short = slow.changed({"placement.outage_budget_s": needed - 0.01})
    (found,) = refusals(short)
    takes, has = map(
        int, re.findall(r"takes (\d+) s and islands have data for (\d+)", found.text)[0]
    )
    assert takes == has + 1 == found.change["placement.outage_budget_s"]


def test_a_change_is_the_smallest_one(mixed):
    slow = dataclasses.replace(mixed, link_gbit_per_s=0.9).changed(
        {"placement.time_budget_s": 120.0}
    )
    (found,) = refusals(slow)
    cycle = found.change["sync.steps_per_cycle"]
    less = slow.changed({"sync.steps_per_cycle": cycle - 1})
    assert [r.check for r in refusals(less)] == ["link"]


def test_hosts_and_copies_do_not_multiply_what_crosses_a_link(mixed):
    more = dataclasses.replace(mixed, hosts=dict.fromkeys(mixed.hosts, 512))
    assert needs_of(more).networks == needs_of(mixed).networks


def test_an_uneven_fragment_sets_the_peak(mixed):
    sizes = mixed.fragments.sizes
    rates = needs_of(mixed).networks["v5p"].down
    uneven = max(sizes) / (sum(sizes) / len(sizes))
    even = 96 / 48 / (4 / 2)  # Mean fragments in half of tau, over the mean rate.
    assert rates.peak / rates.mean == pytest.approx(uneven * even, rel=0.01)


def test_snapshots_in_a_bucket_leave_the_disk(mixed):
    there = mixed.changed({"placement.checkpoints": "gs://bucket/run"})
    here, away = (needs_of(t).coordinator.disk for t in (mixed, there))
    assert away.expected == away.log + away.lines == here.expected - here.snapshots
    assert away.bytes == away.expected + away.reserve
    assert away.bytes_per_s == away.log_bytes_per_s < here.bytes_per_s
    assert away.round_seconds == here.round_seconds, "no bucket's rate is known"


def test_a_small_machine_slows_its_disk(mixed):
    """Then a larger disk does not help, and a larger machine does."""
    few = {"launch.coordinator_machine": "n2-standard-2", "sync.steps_per_cycle": 64}
    terms = mixed.changed(few)
    assert terms.disk_bytes_per_s == 240 * 2**20
    found = {refusal.check: refusal for refusal in refusals(terms)}
    assert "which takes 252" in found["disk speed"].text
    change = found["disk speed"].change
    assert set(change) == {"launch.coordinator_machine"}
    assert machine_of(change["launch.coordinator_machine"]).disk_mib_per_s > 240


def test_an_outage_and_a_gathering_have_their_costs(mixed):
    """A restart takes cycles of the run. Of 64 islands each but one sends a ballot."""
    few = needs_of(mixed).outage
    assert few.lasts
    assert few.cycles_apart == few.restart_seconds / mixed.cycle_seconds
    assert few.share_apart < 0.05
    slow = mixed.changed({"placement.snapshot_every_s": 1200.0})
    assert not needs_of(slow).outage.lasts
    assert "then their steps wait" in "".join(needs_of(slow).outage.lines())
    assert few.anchor_bytes == 4 * mixed.fragments.total
    names = [f"i{number}" for number in range(64)]
    many = dataclasses.replace(
        mixed, hosts=dict.fromkeys(names, 1), step_seconds=dict.fromkeys(names, 0.95)
    )
    small = many.changed({"placement.merge_buffer_bytes": 16 * 10**9})
    gathered = needs_of(small).outage
    assert gathered.ballot_bytes == 63 * few.ballot_bytes
    # A digest of 32 bytes and a hundredth of the values of each tile.
    assert 0.0100 < few.ballot_bytes / few.anchor_bytes < 0.0115
    assert gathered.on_disk_bytes > 0 == few.on_disk_bytes
    assert gathered.gathering_seconds > few.gathering_seconds


def test_unknown_machines_are_refused_with_the_known_ones():
    assert disk_bytes_per_s(10**6) == 1200 * 2**20
    with pytest.raises(ConfigError, match=r"'n9-huge'.*n2-highmem-48"):
        machine_of("n9-huge")


# ---- memory of the chips ----------------------------------------------------------


def hbm(terms):
    """What the plan says of HBM; None if nothing."""
    return next((r for r in refusals(terms) if r.check == "HBM"), None)


def test_what_rests_in_hbm_counts_by_hand(mixed):
    """f32: parameters, two moments, anchors, residuals; and what takes under way hold.
    Vectors lie whole everywhere, and are few."""
    total, alone = mixed.fragments.total, mixed.changed(ONE_CHIP)
    sync, largest = mixed.run.sync, max(mixed.fragments.sizes)
    takes = largest * open_fragments(sync)
    feedback = sync.error_feedback
    held = 4 * (total + takes) * (1 + feedback)
    for terms, devices in ((alone, 1), (mixed, 64)):
        least, has = least_hbm_of(terms)["v6e"]
        assert least == pytest.approx((12 * total + held) / devices, rel=2e-3)
        assert has == int(31.25 * 2**30)
        host = terms.changed({"islands.v6e.anchor_memory": "pinned_host"})
        assert least_hbm_of(host)["v6e"][0] == pytest.approx(
            12 * total / devices, rel=2e-3
        )


def test_more_fsdp_or_anchors_in_host_memory_or_a_larger_slice_are_proposed(mixed):
    copies = {"mesh_data": 64, "mesh_fsdp": 4}
    apart = mixed.changed({f"islands.v6e.{f}": v for f, v in copies.items()})
    assert hbm(apart).change == {
        "islands.v6e.mesh_data": 1,
        "islands.v6e.mesh_fsdp": 256,
    }
    four = {"topology": "v6e:2x2", "mesh_data": 1, "mesh_fsdp": 4}
    small = mixed.changed({f"islands.v6e.{f}": v for f, v in four.items()})
    assert hbm(small).change == {
        "islands.v6e.topology": "v6e:2x4",
        "islands.v6e.mesh_fsdp": 8,
    }
    has = {"v6e": {"value": 50 * GB, "origin": "measured"}}
    measured = msgspec.convert({"device_memory_bytes": has}, Measurements)
    more = dataclasses.replace(small, measured=measured)
    assert hbm(more).change == {"islands.v6e.anchor_memory": "pinned_host"}


def test_frozen_weights_count_in_the_dtype_in_which_they_rest(mixed):
    island = {"islands.v6e.compute_dtype": "bfloat16", "model.weights": "hf:there"}
    lora = mixed.changed(ONE_CHIP | island | {"model.lora_rank": 8})
    lora = dataclasses.replace(lora, fragments=fragments_of(lora.config))
    least, _ = least_hbm_of(lora)["v6e"]
    assert least == pytest.approx(2 * mixed.fragments.total, rel=0.05)


def test_of_a_model_of_ones_own_and_of_what_was_compiled_no_check_knows(mixed):
    alone = mixed.changed(ONE_CHIP)
    assert hbm(alone)
    assert least_hbm_of(alone.changed({"model.factory": "mine.py:model"})) == {}
    assert hbm(dataclasses.replace(alone, hbm_known=True)) is None


def test_arithmetic_refuses_what_cannot_fit_and_does_not_say_that_the_rest_fits(capsys):
    path = str(CONFIGS / "mixed_12b.py")
    words = ["plan", path, "--arithmetic", "--json"]
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is None
    assert found["islands"]["v6e"]["least_hbm_bytes"] < 4 * GB
    alone = [f"--{field}={value}" for field, value in ONE_CHIP.items()]
    assert cli.main([*words, *alone]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert [refusal["check"] for refusal in found["run"]["refusals"]] == ["HBM"]
    assert found["run"]["mended"]["change"]["islands.v6e.topology"] == "v6e:2x4"


# ---- without a compiler ----------------------------------------------------------


def test_arithmetic_needs_no_libtpu_and_says_what_it_is(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = str(CONFIGS / "four_regions.py")
    prices = "v5p=4,v6e=2,coordinator=3"
    command = ["plan", path, "--arithmetic", "--price"]
    assert cli.main([*command, prices]) == 2
    assert "lacks traffic; add traffic=NUMBER" in capsys.readouterr().err
    assert cli.main([*command, f"{prices},traffic=0"]) == 0
    shown = capsys.readouterr().err
    assert (
        "arithmetic, nothing compiled, HBM checked by what rests in it alone" in shown
    )
    assert "price per hour: 1,539.00 (v5p 512.00, v6e 1,024.00, coordina" in shown
    assert "by your --price; without disks of islands, and discounts" in shown
    assert "expected: 36,936.00 per day" in shown
    assert "east, europe: step 0.9549 s [at peak]" in shown
    assert "[at 0.5 of peak]" in shown
    assert "constant: `python benchmarks/merging.py`" in shown


def test_a_trillion_parameters_are_too_many_for_one_process():
    """The checks of memory and disk know no single change, and a set of them does."""
    long = dict.fromkeys(shipped("paper_1t").hosts, 150.0)
    terms = dataclasses.replace(shipped("paper_1t"), step_seconds=long)
    assert refusals(terms) == []
    alone = terms.changed(
        {"placement.workers": 1, "placement.merge_buffer_bytes": 1 << 40}
    )
    found = {refusal.check: refusal for refusal in refusals(alone)}
    assert set(found) == {"memory", "disk bytes"}
    assert found["memory"].change == {}
    whole = mended(alone)
    assert whole.change["placement.workers"] > 1
    assert refusals(alone.changed(whole.change)) == []
    # Nothing of the set can be left out.
    for path in whole.change:
        less = {p: value for p, value in whole.change.items() if p != path}
        assert refusals(alone.changed(less))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("sixty_four", {"placement.workers": 1}),
        ("four_regions", {"launch.coordinator_machine": "n2-highmem-4"}),
        ("mixed_12b", {"launch.coordinator_machine": "n2-highmem-2"}),
    ],
)
def test_all_refusals_are_mended_without_more_workers_where_that_will_do(name, change):
    small = {"launch.coordinator_disk_gb": 300, "sync.steps_per_cycle": 64}
    terms = shipped(name).changed(change | small)
    assert len(refusals(terms)) > 3
    whole = mended(terms)
    assert "placement.workers" not in whole.change
    assert refusals(terms.changed(whole.change)) == []


# ---- the configs that are planned ------------------------------------------------


def test_four_regions_have_the_islands_whose_compilations_they_share():
    two, four = (shipped(n).config.islands for n in ("mixed_12b", "four_regions"))
    assert set(map(repr, four.values())) == set(map(repr, two.values()))


def test_sixty_four_islands_are_those_of_two_and_pass_on_slow_links():
    two, terms = shipped("mixed_12b").config.islands, shipped("sixty_four", link=2.0)
    assert len(terms.config.islands) == 64
    assert set(map(repr, terms.config.islands.values())) == set(map(repr, two.values()))
    regions = {region_of(zone) for zone in terms.config.launch.zones.values()}
    assert len(regions) == 4
    assert refusals(terms) == []
    # One process is too few, and the plan knows what it lacks.
    alone = terms.changed({"placement.workers": 1})
    assert {"cores", "memory", "merging"} <= {r.check for r in refusals(alone)}


def test_assumptions_are_those_of_the_simulator_where_it_has_them():
    assert Assumptions().mtbi_years == FailureModel().mtbi_years
    assert Assumptions().link_gbit_per_s == ExchangeTerms().link_gbit_per_s
    assert BandwidthConfig().link_utilisation == checks.LINK_UTILISATION
    options = PlanOptions(mtbi_years=2.0, json=True)
    assert options.assumptions == Assumptions(mtbi_years=2.0)
