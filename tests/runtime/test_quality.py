"""The study of quality: a rung of its ladder is one change, and what merges moments is
an emulation but for that."""

import dataclasses

import pytest
import quality_moments
from quality_configs import SIZES
from quality_levers import MEAN, MERGED, NEVER, ORDERS, RUNGS
from quality_report import ladder, shares
from quality_rows import rows

from diloco_jax import emulate

SHORT = SIZES["0.04m, short"]


def test_a_rung_is_the_same_change_in_both_orders():
    found = {row.name: row for row in rows(SHORT)}

    def change(order, place):
        above, below = (found[ORDERS[order][n]] for n in (place, place + 1))
        each = [
            dataclasses.asdict(row.config.run.sync)
            | {"plain": row.plain, "moments": row.moments_every}
            for row in (above, below)
        ]
        return {
            name: (each[0][name], each[1][name])
            for name in each[0]
            if each[0][name] != each[1][name]
        }

    changes = [change(0, first) for _, first, _ in RUNGS]
    assert [change(1, second) for _, _, second in RUNGS] == changes
    assert [set(each) for each in changes[:3]] == [
        {"codec_up", "codec_down"},
        {"quorum", "grace", "overlap_steps"},
        {"steps_per_cycle", "fragments"},
    ]
    assert changes[-2] == {"moments": (0, 1)}


@pytest.mark.parametrize("order", [0, 1])
def test_shares_add_up_to_the_gap(order):
    losses = {
        name: {seed: 2 + (7 * n * n + seed) % 11 / 10 for seed in (0, 1)}
        for n, name in enumerate(dict.fromkeys(ORDERS[0] + ORDERS[1]))
    }
    for seed in (0, 1):
        base = losses["data-parallel"][seed]
        gap = 100 * (losses[ORDERS[order][0]][seed] / base - 1)
        places = [own[order] for _, *own in RUNGS]
        total = sum(shares(losses, order, place)[seed] for place in places)
        assert total == pytest.approx(gap)
    del losses["data-parallel"][1]
    assert ladder(losses).count("(1)") == 3 * len(RUNGS) - 2 * 3


@pytest.mark.parametrize(("power", "early"), [(1, ()), (2, ()), (1, (4, 56))])
def test_merges_come_otherwise_and_are_as_many(power, early):
    at = quality_moments.merge_steps(586, 24, power, early)
    assert (len(at), max(at)) == (25, 586)
    assert not early or set(range(4, 57, 4)) == {step for step in at if step <= 56}


@pytest.mark.nightly
def test_merging_moments_is_an_emulation_but_for_the_moments():
    size = dataclasses.replace(SHORT, tokens=4 * SHORT.sequences * SHORT.sequence)
    found = {row.name: row for row in rows(size)}
    config = found[MEAN].config
    emulated = emulate(config, options=found[MEAN].options).summary["eval_loss"]
    own = quality_moments.run(config, NEVER, 1.0)["eval_loss"]
    assert own == pytest.approx(emulated, abs=2e-6)
    every = found[MERGED].moments_every
    merged = quality_moments.run(config, every, 1.0)["eval_loss"]
    assert abs(merged - emulated) > 1e-4
