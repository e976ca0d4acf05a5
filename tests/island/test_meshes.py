"""Every mesh trains one model, and takes, sends and adopts the same bits, locally."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from diloco_jax.before_jax import prepare_environment

SCRIPT = Path(__file__).with_name("sharded_island.py")
FUNCTIONS = ("take", "arrive", "advance", "adopt", "move", "put")


@pytest.fixture(scope="module")
def found():
    prepare_environment(8, inherited := dict(os.environ))
    done = subprocess.run(
        [sys.executable, SCRIPT],
        env={**inherited, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


MESHES = ["2x2x1", "2x2x2", "1x4x1"]


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_as_one_device(found, mesh):
    one = found["1x1x1"]
    assert found[mesh]["distance"] < 1e-6
    np.testing.assert_allclose(found[mesh]["losses"], one["losses"], rtol=1e-5)
    np.testing.assert_allclose(found[mesh]["eval"], one["eval"], rtol=1e-5)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("bits", ["taken", "adopted", "anchors"])
def test_bits_do_not_depend_on_the_mesh(found, mesh, bits):
    assert found[mesh][bits] == found["1x1x1"][bits]


def test_stacks_of_small_tensors_have_the_same_bits_on_a_mesh(found):
    assert len(found["stacks"]) > 100
    assert all(found["stacks"])


def test_every_codec_has_the_same_bits_on_a_mesh_and_needs_no_other_chip(found):
    assert len(found["codecs"]) > 5
    assert [name for name, same in found["codecs"].items() if not same] == []


@pytest.mark.parametrize("mesh", ["1x1x1", *MESHES])
def test_nothing_compiles_after_what_is_compiled_ahead(found, mesh):
    assert found[mesh]["compiled_late"] == 0
    assert found[mesh]["steps_compiled"] == 1


@pytest.mark.parametrize("mesh", MESHES)
def test_aligned_pieces_are_taken_and_adopted_where_they_lie(found, mesh):
    pieces = found[mesh]["pieces"]
    aligned = [p for p in pieces.values() if p["cut"] == p["octets_cut"]]
    assert {axis for p in aligned for axis in p["cut"]} == (
        {"fsdp", "tensor"} if mesh == "2x2x2" else {"fsdp"}
    )
    for piece in aligned:
        assert not any(piece[name] for name in FUNCTIONS)


def test_pieces_cut_inside_tiles_are_gathered(found):
    pieces = found["1x4x1"]["pieces"]
    unaligned = [p for p in pieces.values() if p["cut"] != p["octets_cut"]]
    assert unaligned
    for piece in unaligned:
        assert piece["take"] == piece["arrive"] == piece["advance"] == ["all-gather"]
        assert piece["adopt"] == piece["move"] == piece["put"] == []


@pytest.mark.parametrize("mesh", MESHES)
def test_steps_gather_weights_and_reduce_gradients(found, mesh):
    assert found["1x1x1"]["step"] == []
    assert found[mesh]["step"] == ["all-gather", "all-reduce"]


@pytest.mark.parametrize("mesh", ["2x2x1", "2x2x2"])
def test_a_device_sums_no_more_of_a_layers_gradient_than_it_keeps(found, mesh):
    """First the devices of "fsdp", each its part, then those of "data" that part."""
    tables = 2 * 256 * 128  # What the embedding gets from its two uses is summed whole.
    assert found[mesh]["reduced"]["4"] <= tables
    assert found[mesh]["reduced"]["2"] > tables


def test_anchors_rest_where_they_are_told(found):
    assert found["2x2x1"]["anchors_in"] == ["pinned_host"]
    assert found["2x2x2"]["anchors_in"] == ["device"]


def test_the_kernel_sees_whole_groups_of_heads_on_every_device(found):
    assert max(found["splash"]) < 1e-5


def test_what_hosts_fetch_apart_comes_to_every_device_that_needs_it(found):
    assert len(found["spread"]) >= 6
    for mesh, wrong in found["spread"].items():
        assert wrong == [], mesh
