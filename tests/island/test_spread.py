"""Each byte of a publish or an anchor comes to one host of the island."""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from diloco_jax.config import IslandConfig, RunConfig, SyncConfig
from diloco_jax.config.loading import read_config
from diloco_jax.coordinator.holding.inbox import Coverage
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import FragmentPlan, Part, PayloadLayout, Piece
from diloco_jax.island.device.mesh import (
    LARGE,
    abstract,
    make_mesh,
    param_shardings,
    parts_by_host,
)
from diloco_jax.island.device.programs import PiecePrograms
from diloco_jax.models.build import build, build_plan
from diloco_jax.models.presets import preset

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="needs libtpu"
    ),
]

CONFIGS = Path(__file__).parents[2] / "configs"
REFERENCES = sorted(
    {
        ("12b", island.topology, island.mesh_data, island.mesh_fsdp)
        for name in ("mixed_12b", "four_regions")
        for island in read_config(CONFIGS / f"{name}.py").islands.values()
    }
)
"""Islands of the reference configs: model, topology, mesh_data, mesh_fsdp."""
ISLANDS = [
    *REFERENCES,
    ("12b", "v6e:16x16", 1, 256),
    ("12b", "v6e:16x16", 16, 16),
    ("12b", "v5p:4x4x4", 1, 64),
    ("12b", "v6e:8x8", 1, 64),
    ("1b", "v6e:4x4", 4, 4),
    ("1b", "v6e:4x4", 1, 16),
    ("1b", "v6e:4x4", 16, 1),
]
SYNC = SyncConfig(steps_per_cycle=96, fragments=48)
COLLECTIVE = re.compile(
    r"= \(?(\w+)\[[^=]* (all-gather|all-reduce|all-to-all|collective-permute"
    r"|reduce-scatter|send|recv|infeed|outfeed)(?:-start)?\("
)


@functools.cache
def devices(topology: str) -> Any:
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


@functools.cache
def pieces_of(
    model: str, topology: str, data: int, fsdp: int
) -> tuple[RunConfig, FragmentPlan, dict[Piece, PiecePrograms], dict[str, Any]]:
    """The run, its plan, the programs of each piece, and parameters without values."""
    run = RunConfig(model=preset(model), sync=SYNC, sequence_length=4096)
    mesh = make_mesh(
        IslandConfig(
            topology=topology, batch_size=data * fsdp, mesh_data=data, mesh_fsdp=fsdp
        ),
        devices(topology),
    )
    built = build(run)
    shapes = built.shapes()
    shardings = param_shardings(mesh, built.axes, shapes)
    like = jax.tree.map(
        lambda x, sharding: abstract(x.shape, np.float32, sharding), shapes, shardings
    )
    plan = build_plan(run, built)

    def leaf(piece: Piece) -> Any:
        return functools.reduce(lambda node, key: node[key], piece.path, like)

    kinds = {p: PiecePrograms.of(SYNC, p, leaf(p), "device") for p in plan.pieces}
    return run, plan, kinds, like


def all_parts(
    plan: FragmentPlan, kinds: dict[Piece, PiecePrograms]
) -> list[dict[int, Part]]:
    return [
        parts_by_host([(kinds[piece].spread, piece.grid) for piece in pieces])
        for pieces in plan.fragments
    ]


@pytest.mark.parametrize("name", ["mixed_12b", "four_regions"])
def test_islands_of_the_reference_configs_are_among_these(name):
    config = read_config(CONFIGS / f"{name}.py")
    assert config.run.model == preset("12b")
    assert config.run.sync.fragments == SYNC.fragments
    assert all(island.mesh_tensor == 1 for island in config.islands.values())


@pytest.mark.parametrize(("model", "topology", "data", "fsdp"), ISLANDS)
def test_hosts_fetch_each_byte_once(model, topology, data, fsdp):
    """So do publishes, anchors as a join fetches them, and bands."""
    run, plan, kinds, _ = pieces_of(model, topology, data, fsdp)
    assert any(piece.bands for piece in plan.pieces)
    codec = get_codec(run.sync.codec_down)
    loads = dict.fromkeys({d.process_index for d in devices(topology)}, 0)
    assert len(loads) == data * fsdp // 4
    for pieces, parts in zip(plan.fragments, all_parts(plan, kinds), strict=True):
        layout = PayloadLayout.of(codec, pieces)
        covered = Coverage(layout)
        assert parts.keys() == loads.keys()
        for host, part in parts.items():
            loads[host] += layout.part_bytes(part)
            covered.add(part)
        assert covered.complete
        assert sum(map(layout.part_bytes, parts.values())) == layout.total_bytes
        whole = PayloadLayout.of(get_codec("f32"), pieces)
        values = sum(map(whole.part_bytes, parts.values()))
        assert values == 4 * sum(piece.size for piece in pieces)
    mean = sum(loads.values()) / len(loads)
    assert max(loads.values()) <= 1.02 * mean


@pytest.mark.parametrize(("model", "topology", "data", "fsdp"), REFERENCES)
def test_a_band_is_taken_and_adopted_where_it_lies(model, topology, data, fsdp):
    """Without a collective; the parameter is written in place, and at most copied as a
    whole on the way."""
    _, plan, kinds, like = pieces_of(model, topology, data, fsdp)
    band = next(piece for piece in plan.pieces if piece.bands)
    kind, leaf = kinds[band], like["embedding"]
    assert kind.piece.spec == kind.encoded.spec
    shard = 4 * math.prod(leaf.sharding.shard_shape(leaf.shape))
    own = 4 * math.prod(kind.piece.shard_shape(band.shape))
    for name in ("take", "arrive", "adopt", "put"):
        lowered = kind.lower(name)
        assert collectives(lowered) == [], name
        memory = lowered.compile().memory_analysis()
        assert memory.temp_size_in_bytes <= 1.1 * shard + 8 * own, name
        assert (memory.alias_size_in_bytes >= shard) == (name != "take"), name


@pytest.mark.parametrize(("model", "topology", "data", "fsdp"), ISLANDS[:3])
def test_tiles_move_as_bytes_over_the_interconnect(model, topology, data, fsdp):
    _, _, kinds, _ = pieces_of(model, topology, data, fsdp)
    seen = set()
    for piece, kind in kinds.items():
        if (piece.shape, kind.encoded) in seen or not kind.spread.moved:
            continue
        seen.add((piece.shape, kind.encoded))
        publish = collectives(kind.lower("gather"))
        anchor = collectives(kind.lower("gather_anchor"))
        if kind.spread.rows == 1:
            assert publish == [("u8", "all-gather")], piece.name
        else:
            # Rows are summed, as words of four bytes, and what was cut is gathered.
            assert publish[0] == ("u32", "all-reduce"), piece.name
            assert publish[1:] in ([], [("u8", "all-gather")]), piece.name
            assert math.prod(piece.shape) < LARGE
        assert {name for _, name in anchor} <= {"all-gather", "all-reduce"}
        assert {dtype for dtype, _ in anchor} <= {"u32", "f32"}
    assert seen


def collectives(lowered: Any) -> list[tuple[str, str]]:
    """Type and name of all collectives and transfers of the compiled program."""
    return COLLECTIVE.findall(lowered.compile().as_text())
