"""Uneven fragments are told, with the smallest change that mends them and costs
nothing."""

import dataclasses

import pytest
from plan_support import CONFIG
from test_plan_advice import Compiler, advised, config_of, planned

from diloco_jax import cli
from diloco_jax.config import Config, RunConfig, SyncConfig
from diloco_jax.config.loading import write_config_json
from diloco_jax.core.fragments import EVEN
from diloco_jax.models.presets import preset
from diloco_jax.planning.changes import changed
from diloco_jax.planning.evenness import to_even, unevenness
from diloco_jax.planning.report import fragments_of

LARGE = Config(
    run=RunConfig(
        model=preset("12b"), sync=SyncConfig(steps_per_cycle=160, fragments=128)
    ),
    islands=CONFIG.islands,
)
PIECES = 20
"""Fragments of the small model that are uneven, whose bands are others than those of
fewer fragments."""


def told(config, accepts=lambda *_: True):
    return list(to_even(config, fragments_of(config), accepts))


def test_even_fragments_are_left_alone():
    assert told(changed(LARGE, {"sync.fragments": 114})) == []


def test_the_nearest_number_of_fragments_that_is_even_and_no_larger():
    """Two matrices that RDA keeps whole share a fragment of 128."""
    before = fragments_of(LARGE)
    (advice,) = told(LARGE)
    (change,) = advice.changes
    assert change == {"sync.fragments": 114}
    assert "the largest of 128 fragments is 1.28 of the mean, above 1.15" in advice.text
    after = fragments_of(changed(LARGE, change))
    assert unevenness(after) <= EVEN
    assert max(after.sizes) <= max(before.sizes)
    for count in range(115, 142):
        cut = fragments_of(changed(LARGE, {"sync.fragments": count}))
        assert unevenness(cut) > EVEN or max(cut.sizes) > max(before.sizes)


def test_even_fragments_with_a_larger_one_are_not_proposed():
    """101 are even, but their largest is 3 % larger."""

    def few(change, then, cut):
        return change.get("sync.fragments", 999) <= 101

    few_even = fragments_of(changed(LARGE, {"sync.fragments": 101}))
    assert unevenness(few_even) <= EVEN
    assert max(few_even.sizes) > max(fragments_of(LARGE).sizes)
    (advice,) = told(LARGE, few)
    assert advice.changes == ()


@pytest.mark.parametrize(
    ("fragments", "by", "change"),
    [
        (4, "layer", {"sync.fragments": 3}),
        # Four are uneven as well, and three are far away.
        (5, "layer", {"sync.fragment_by": "size"}),
        (8, "tensor", {"sync.fragments": 7}),
        # Three are even, and the largest would be larger.
        (4, "tensor", {"sync.fragment_by": "size"}),
    ],
)
def test_units_that_are_too_large_are_fewer_or_smaller(fragments, by, change):
    config = config_of(fragments=fragments, fragment_by=by)
    (advice,) = told(config)
    assert advice.changes == (change,)
    after = fragments_of(changed(config, change))
    assert unevenness(after) <= EVEN < unevenness(fragments_of(config))


def test_a_rule_that_cuts_all_tensors_comes_last():
    config = changed(LARGE, {"sync.fragments": 128})

    def other_than_counts(change, then, cut):
        assert then == changed(config, change)
        assert cut == fragments_of(then)
        return "sync.fragments" not in change

    (advice,) = told(config, other_than_counts)
    assert advice.changes == ({"sync.merge": "mean"},)
    assert "of the mean and 20% smaller" in advice.text


def test_what_nothing_mends_names_the_piece_and_what_keeps_it_whole():
    (advice,) = told(LARGE, lambda *_: False)
    assert advice.changes == ()
    assert "no setting that was tried mends it: its largest piece is layers/" in (
        advice.text
    )
    assert "of 58,982,400 parameters, with sync.fragment_by = 'size', sync.merge" in (
        advice.text
    )


# ---- in a plan -------------------------------------------------------------------


def test_a_plan_with_the_change_is_no_worse_and_needs_no_compilation():
    """The pieces are the same: only their fragments are others."""
    config = config_of(fragments=5, fragment_by="layer")
    compiler = Compiler(activations_gb=0.1)
    plan, advice = advised(config, compiler)
    assert len(compiler.asked) == 2
    (found,) = [a for a in advice if "of the mean" in a.text]
    (change,) = found.changes
    after = planned(changed(config, change), compiler)
    assert after.fits
    for name, island in after.islands.items():
        assert island.network.down.peak < plan.islands[name].network.down.peak


def test_a_change_that_makes_other_pieces_is_compiled_before_it_is_told():
    config = config_of(fragments=PIECES, steps_per_cycle=2 * PIECES)
    compiler = Compiler(activations_gb=0.1)
    _, advice = advised(config, compiler)
    (found,) = [a for a in advice if "of the mean" in a.text]
    assert found.changes
    assert {name for name, _ in compiler.asked[2:]} == set(config.islands)

    def full(now, name):
        plan = compiler(now, name)
        if now.run == config.run:
            return plan
        hbm = dataclasses.replace(plan.hbm, missing=1)
        return dataclasses.replace(plan, hbm=hbm, fits=False)

    _, advice = advised(config, full)
    (found,) = [a for a in advice if "of the mean" in a.text]
    assert found.changes == ()


def test_arithmetic_tells_it_too(tmp_path, capsys):
    path = tmp_path / "large.json"
    write_config_json(LARGE, path)
    cli.main(["plan", str(path), "--arithmetic"])
    assert "set sync.fragments = 114, with which it is 1.14" in capsys.readouterr().err
