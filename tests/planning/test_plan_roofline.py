"""Times by published rates."""

import dataclasses

import plan_support
import pytest

from diloco_jax.hardware.tpus import (
    find_slice,
    ici_bytes_per_s,
)
from diloco_jax.planning.program import CollectiveSum

GATHER = CollectiveSum(
    kind="all-gather",
    count=10,
    sent_bytes=40 * 10**9,
    overlapping=5,
    overlapping_bytes=30 * 10**9,
    largest_group=16,
)


@pytest.mark.parametrize(
    ("topology", "links"),
    [
        ("v5p:2x2x1", 2),  # Two lines of two.
        ("v5p:2x4x4", 3),  # Not a cube: no rings.
        ("v5p:4x4x4", 6),
        ("v5p:4x4x8", 6),
        ("v6e:1x1", 0),
        ("v6e:2x2", 2),
        ("v6e:8x16", 3),
        ("v6e:16x16", 4),
        ("v5e:8x16", 3),
        ("v4:4x4x4", 6),
    ],
)
def test_a_chip_sends_on_the_links_that_its_slice_has(topology, links):
    found = find_slice(topology, "topology")
    chip = found.generation
    each = chip.ici_bytes_per_s / (2 * len(found.axes))
    assert ici_bytes_per_s(found) == pytest.approx(links * each)


def test_what_overlaps_costs_as_long_as_the_longest():
    # 16 chips of 918 TFLOP/s for one second; lines of four: 200 GB/s.
    times = plan_support.island(
        "v6e:4x4", flops=16 * 918e12, hbm_bytes=int(819e9), collectives=(GATHER,)
    ).roofline
    assert times.compute_seconds == pytest.approx(1.0)
    assert times.hbm_seconds == pytest.approx(0.5)
    assert times.ici_seconds == pytest.approx(0.2)
    assert times.waiting_seconds == pytest.approx(0.05)
    assert times.binding == "compute"
    assert times.step_seconds == pytest.approx(1.05)
    assert times.model_flops_utilisation == pytest.approx(1 / 1.05)


@pytest.mark.parametrize(
    ("hbm_bytes", "sent", "binding"),
    [(int(4e12), 0, "hbm"), (0, int(4e12), "ici"), (0, 0, "compute")],
)
def test_the_longest_binds(hbm_bytes, sent, binding):
    gather = dataclasses.replace(GATHER, sent_bytes=sent, overlapping_bytes=0)
    times = plan_support.island(
        "v5p:4x4x4", flops=64 * 459e12, hbm_bytes=hbm_bytes, collectives=(gather,)
    ).roofline
    assert times.binding == binding


def test_a_single_chip_has_nobody_to_talk_to():
    times = plan_support.island("v6e:1x1", flops=918e12).roofline
    assert times.ici_seconds == 0.0
    assert times.step_seconds == pytest.approx(1.0)
