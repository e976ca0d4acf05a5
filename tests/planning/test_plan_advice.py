"""Advice is a single change; what arithmetic can try makes nothing else worse."""

import dataclasses

import plan_support
import pytest
from plan_support import CONFIG, GB, HBM

from diloco_jax import cli
from diloco_jax.config.loading import write_config_json
from diloco_jax.core.fragments import EVEN
from diloco_jax.planning import advice as module
from diloco_jax.planning.advice import unevenness
from diloco_jax.planning.options import Assumptions
from diloco_jax.planning.plan import fragments_of, plan_run

FLOPS = 918e12
"""Operations of one sequence: a second on a chip of v6e."""


def planned(config, link=1000.0, big_hbm=HBM, traffic=0):
    """The plan of a config whose islands take as long as their batches say."""
    compiled = {
        name: plan_support.island(
            island.topology,
            flops=FLOPS * island.batch_size,
            hbm_bytes=traffic,
            hbm=big_hbm if name == "big" else HBM,
        )
        for name, island in config.islands.items()
    }
    return plan_support.planned(config, compiled=compiled, link_gbit_per_s=link)


def config_of(big=None, **sync):
    """The config of two islands, v6e:4x4 and v5p:2x2x1, with changes."""
    change = {f"islands.big.{field}": v for field, v in (big or {}).items()}
    return CONFIG.replace(change | {f"sync.{field}": v for field, v in sync.items()})


def advised(plan, check):
    return [advice for advice in plan.advice if advice.check == check]


# ---- for another compilation ---------------------------------------------------------


@pytest.mark.parametrize(
    ("big", "used_gb", "fields"),
    [
        ({}, 33, {"remat": "full"}),
        # No more rounds than the missing bytes ask for.
        ({"remat": "full"}, 50, {"accumulation": 4}),
        ({"remat": "full"}, 36, {"accumulation": 2}),
        (
            {"remat": "full", "mesh_data": 4, "mesh_fsdp": 4, "batch_size": 16},
            33,
            {"mesh_data": 1, "mesh_fsdp": 16},
        ),
        (
            {"remat": "full", "batch_size": 16},
            33,
            {"anchor_memory": "pinned_host"},
        ),
    ],
)
def test_an_island_that_does_not_fit_is_told_what_takes_less(big, used_gb, fields):
    full = dataclasses.replace(HBM, used=used_gb * GB, missing=(used_gb - 30) * GB)
    (advice,) = planned(config_of(big), big_hbm=full).advice
    assert advice.check == "hbm"
    assert advice.change == {f"islands.big.{field}": v for field, v in fields.items()}
    assert (
        f"islands.big lacks {used_gb - 30}.00 GB of HBM per chip: try " in advice.text
    )
    assert advice.text.endswith("or a larger topology than v6e:4x4")


def test_where_no_setting_takes_less_a_larger_slice_is_left():
    big = {"remat": "full", "batch_size": 16, "anchor_memory": "pinned_host"}
    full = dataclasses.replace(HBM, used=33 * GB, missing=3 * GB)
    (advice,) = planned(config_of(big), big_hbm=full).advice
    assert advice.change == {}
    assert advice.text.endswith("per chip: try a larger topology than v6e:4x4")


def test_a_step_bound_by_its_memory_may_have_a_larger_batch_that_fits():
    bound = int(1e14)
    roomy = dataclasses.replace(HBM, used=20 * GB, temporaries=9 * GB)
    (advice, *_) = advised(planned(config_of(), big_hbm=roomy, traffic=bound), "batch")
    assert advice.change == {"islands.big.batch_size": 128}
    full = dataclasses.replace(HBM, used=22 * GB, temporaries=9 * GB)
    told = advised(planned(config_of(), big_hbm=full, traffic=bound), "batch")
    assert advice.change not in [other.change for other in told]


def test_a_plan_of_steps_that_compute_has_no_advice():
    assert planned(config_of()).advice == []


# ---- tried by arithmetic -------------------------------------------------------------


def test_a_largest_fragment_that_is_late_comes_with_the_overlap_that_it_needs():
    config = config_of(steps_per_cycle=20, fragments=20, overlap_steps=1)
    rates = planned(config).islands["big"].network.down
    link = max(rates.mean, 0.4 * rates.peak)
    (advice,) = advised(planned(config, link), "late")
    assert set(advice.change) == {"sync.overlap_steps"}
    after = planned(config.replace(advice.change), link).islands["big"].network
    assert max(after.down.peak, after.up.peak) <= link
    short = config_of(steps_per_cycle=2, fragments=2, overlap_steps=1)
    link = 1.05 * planned(short).islands["big"].network.down.mean
    (advice,) = advised(planned(short, link), "late")
    assert advice.change == {}
    assert "take codecs or a cycle of those that the links carry" in advice.text


UNEVEN = CONFIG.replace({"sync.fragments": 20})


def uneven(config):
    """Advice on a plan by arithmetic."""
    return plan_run("x.py", config, fragments_of(config), Assumptions()).advice


def test_even_fragments_are_left_alone():
    assert uneven(CONFIG) == []


def test_the_nearest_number_of_fragments_that_is_even_and_no_larger(tmp_path, capsys):
    """Matrices that RDA keeps whole do not divide into 20 equal parts."""
    before = fragments_of(UNEVEN)
    (advice,) = uneven(UNEVEN)
    assert advice.change == {"sync.fragments": 14}
    assert "the largest of 20 fragments has 8,192" in advice.text
    assert "1.53 of the mean" in advice.text
    cuts = {
        n: fragments_of(UNEVEN.replace({"sync.fragments": n})) for n in range(10, 31)
    }
    good = [
        count
        for count, cut in cuts.items()
        if unevenness(cut) <= EVEN and max(cut.sizes) <= max(before.sizes)
    ]
    assert good == [14]
    # The command tells it, too.
    write_config_json(UNEVEN, tmp_path / "uneven.json")
    cli.main(["plan", str(tmp_path / "uneven.json"), "--arithmetic"])
    assert "set sync.fragments = 14; then the largest of" in capsys.readouterr().err


WHOLE = "no setting that was tried helps; above 1.15 of the mean is uneven"
OTHERS = [
    # Four are uneven too: three are near, of five they are far away.
    ({"fragments": 4, "fragment_by": "layer"}, (), {"sync.fragments": 3}),
    ({"fragment_by": "layer"}, (), {"sync.fragment_by": "size"}),
    ({"fragments": 8, "fragment_by": "tensor"}, (), {"sync.fragments": 7}),
    # Three are even, and the largest would be larger.
    ({"fragments": 4, "fragment_by": "tensor"}, (), {"sync.fragment_by": "size"}),
    # A rule that cuts all tensors comes last.
    ({"fragments": 20}, ("sync.fragments",), {"sync.merge": "mean"}),
    ({"fragments": 20}, ("sync.fragments", "sync.merge"), {}),
]


@pytest.mark.parametrize(("sync", "breaks", "change"), OTHERS)
def test_the_smallest_change_that_evens_fragments(monkeypatch, sync, breaks, change):
    """breaks: changes of these fields break another check."""
    config = CONFIG.replace({f"sync.{field}": v for field, v in sync.items()})
    tried = [module.failing]

    def failing(terms):
        found = tried[0](terms)
        now, then = config.run.sync, terms.config.run.sync
        fields = [field.partition(".")[2] for field in breaks]
        broken = any(getattr(now, f) != getattr(then, f) for f in fields)
        return {**found, "another": None} if broken else found

    monkeypatch.setattr(module, "failing", failing)
    (advice,) = uneven(config)
    assert advice.change == change
    if not change:
        assert WHOLE in advice.text
        assert "of 8,192 parameters, with sync.fragment_by = 'size'" in advice.text
    else:
        after = fragments_of(config.replace(change))
        assert unevenness(after) <= EVEN < unevenness(fragments_of(config))
