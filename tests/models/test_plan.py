"""Fragments of the large presets are even."""

import pytest

from diloco_jax.config import RunConfig, SyncConfig
from diloco_jax.models.build import build
from diloco_jax.models.plan import build_plan
from diloco_jax.models.presets import PRESETS, preset

LARGE = [name for name in PRESETS if name.endswith("b")]


def plan_of(name, fragments, rule="rda"):
    sync = SyncConfig(fragments=fragments, steps_per_cycle=2 * fragments, merge=rule)
    run = RunConfig(model=preset(name), sync=sync)
    return build_plan(run, build(run))


@pytest.mark.parametrize("fragments", [24, 48])
@pytest.mark.parametrize("name", LARGE)
def test_the_largest_fragment_is_little_above_the_mean(name, fragments):
    plan = plan_of(name, fragments)
    assert max(plan.sizes) <= 1.02 * plan.total / fragments
    assert {piece.path for piece in plan.pieces if piece.bands} == {("embedding",)}


def test_pieces_that_a_rule_keeps_whole_limit_the_fragments():
    """A fragment of 12 B by RDA cannot be smaller than its largest matrix."""
    by_rda, by_mean = (plan_of("12b", 240, rule) for rule in ("rda", "mean"))
    assert max(by_rda.sizes) > 1.15 * by_rda.total / 240
    assert max(by_mean.sizes) <= 1.15 * by_mean.total / 240
