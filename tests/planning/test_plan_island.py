"""An island's memory by kind, the compiler's refusals, times by published rates."""

import dataclasses
import types

import jax
import numpy as np
import plan_support
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from diloco_jax.config import SyncConfig
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.hardware.tpus import find_slice, ici_bytes_per_s
from diloco_jax.planning.compiling import (
    Hbm,
    held_between_steps,
    open_fragments,
)
from diloco_jax.planning.program import CollectiveSum

HELD = Hbm(
    parameters=100,
    optimizer=200,
    watched=0,
    anchors=100,
    residuals=100,
    open_takes=20,
    late_takes=180,
    pinned_host=0,
)


@pytest.mark.parametrize(
    ("steps", "fragments", "overlap", "found"),
    [(24, 24, 2, 2), (24, 6, 2, 1), (24, 6, 9, 3), (24, 6, 0, 1), (4, 2, 100, 2)],
)
def test_fragments_under_way_are_those_of_the_overlap(steps, fragments, overlap, found):
    sync = SyncConfig(steps_per_cycle=steps, fragments=fragments, overlap_steps=overlap)
    assert open_fragments(sync) == found


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("on_host", [True, False])
def test_each_chip_holds_its_share(feedback, on_host):
    mesh = AbstractMesh((2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    cut = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    shape = jax.ShapeDtypeStruct((6, 64, 8), np.float32, sharding=cut)
    half = jax.ShapeDtypeStruct((6, 64, 8), "bfloat16", sharding=cut)
    plan = plan_fragments({"w": shape}, {"w": ("layers", "embed", "mlp")}, 3)
    lies = dict.fromkeys(plan.pieces, NamedSharding(mesh, PartitionSpec("fsdp")))
    state = types.SimpleNamespace(
        params={"w": shape}, opt_state={"mu": half, "nu": shape}
    )
    sync = SyncConfig(
        steps_per_cycle=3, fragments=3, overlap_steps=1, error_feedback=feedback
    )
    held = held_between_steps(plan, sync, state, {}, lies, in_host_memory=on_host)
    share = 6 * 64 * 8 * 4 // 4
    assert (held.parameters, held.optimizer) == (share, share + share // 2)
    assert (held.anchors, held.residuals) == (share, share * feedback)
    assert held.watched == 0
    frozen = held_between_steps(
        plan, sync, state, {"base": half}, lies, in_host_memory=on_host
    )
    assert frozen.resting == held.resting + share // 2
    watched = held_between_steps(
        plan, sync, state, {}, lies, in_host_memory=on_host, watched_dtype="bfloat16"
    )
    assert watched.watched == share // 2
    assert watched.beside == held.beside + share // 2
    # Two of the six layers, and with error feedback their residuals as they were.
    assert held.open_takes == share // 3 * (1 + feedback)
    # The other four; nobody holds bases of pending deltas under other rules.
    assert held.late_takes == share * 2 // 3 * (1 + feedback)
    rebase = dataclasses.replace(sync, adopt="rebase")
    other = held_between_steps(plan, rebase, state, {}, lies, in_host_memory=on_host)
    assert other.late_takes == share * 2 // 3 * feedback
    exchange = held.anchors + held.residuals + held.open_takes
    assert (held.beside, held.pinned_host) == (
        (0, exchange) if on_host else (exchange, 0)
    )


def test_what_the_compiler_adds_is_temporary():
    stats = types.SimpleNamespace(
        peak_memory_in_bytes=690, generated_code_size_in_bytes=10
    )
    hbm = HELD.accepted(stats, available=1000)
    assert (hbm.used, hbm.missing) == (700, 0)
    assert hbm.temporaries == 700 - 100 - 200 - 220


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for "
        "HLO temporaries (34.50G) exceeds available HBM (31.25G).",
        "Ran out of memory: 34.50G exceeds available HBM 31.25G",
    ],
)
def test_a_refusal_says_by_how_much(message):
    hbm = HELD.refused(message)
    assert hbm
    assert hbm.missing == int(3.25 * 2**30)
    assert (hbm.available, hbm.temporaries) == (int(31.25 * 2**30), None)


def test_other_errors_are_no_refusals():
    assert HELD.refused("INTERNAL: something else") is None


# ---- times --------------------------------------------------------------------------

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
