"""Run by test_meshes.py in a process of its own; prints what it saw as JSON.

Eight virtual CPU devices train, take and adopt on several meshes.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import re
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from diloco_jax.config import InnerConfig, IslandConfig, RunConfig, SyncConfig
from diloco_jax.core.codecs import Codec, encode_with_feedback, get_codec
from diloco_jax.core.families import CODECS
from diloco_jax.core.fragments import get_piece, tiles_of
from diloco_jax.core.tiles import TileGrid
from diloco_jax.island.device import mesh
from diloco_jax.island.device.build import (
    build_exchange,
    build_trainer,
    compile_ahead,
    join,
)
from diloco_jax.island.device.programs import PiecePrograms, land
from diloco_jax.island.device.step import TrainState
from diloco_jax.island.mailbox import Arrival
from diloco_jax.models.build import build_plan
from diloco_jax.models.layers import ATTENTION
from diloco_jax.models.presets import preset
from diloco_jax.planning.program import group_size
from diloco_jax.protocol.messages import Version

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "core")]
import family_members
import test_held
from test_exchange import anchors_of

COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)
TINY = dataclasses.replace(
    preset("tiny"), d_model=128, head_dim=32, mlp_dim=256, tied_embeddings=True
)
RUN = RunConfig(
    model=TINY,
    sequence_length=16,
    inner=InnerConfig(optimizer="sgd", weight_decay=0.0),
    sync=SyncConfig(
        fragments=12, steps_per_cycle=12, codec_up="int4", codec_down="int8"
    ),
)


def island(shape: str, **options: object) -> IslandConfig:
    """shape: data x fsdp x tensor."""
    data, fsdp, tensor = map(int, shape.split("x"))
    return IslandConfig(
        batch_size=8,
        mesh_data=data,
        mesh_fsdp=fsdp,
        mesh_tensor=tensor,
        remat="full",
        **options,
    )


class Compilations(logging.Handler):
    """Counts what jax says it compiles."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += "Compiling" in record.getMessage()


def train(config: IslandConfig, batches: np.ndarray) -> dict[str, object]:
    """Steps; then, from the same bits on every mesh, takes and adoptions."""
    model, trainer = build_trainer(RUN, config)
    plan = build_plan(RUN, model)
    first = jax.tree.map(np.array, jax.jit(model.init)(jax.random.key(0)))
    codec = get_codec(RUN.sync.codec_down)
    random = np.random.default_rng(1)
    noise = jax.tree.map(lambda x: random.normal(size=x.shape).astype("<f4"), first)
    changes = [
        [codec.encode(get_piece(noise, piece)) for piece in pieces]
        for pieces in plan.fragments
    ]
    exchange, params = build_exchange(RUN, model, trainer)
    compile_ahead(trainer, exchange, RUN.sequence_length)
    counter = Compilations()
    logging.getLogger("jax").addHandler(counter)
    with jax.log_compiles():
        weights = np.ones((8, 16), np.float32)
        trainer.eval_step(params, {"tokens": batches[0], "weights": weights})
        state = TrainState(params, trainer.init_inner(params))
        trainer.step(state, trainer.put_batch({"tokens": batches[0]}), 0.0)
        anchors = {f: put(exchange, plan, f, first) for f in range(RUN.sync.fragments)}
        replica = join(plan, trainer, exchange, anchors)
        losses = [
            float(replica.step({"tokens": tokens}, 0.1)["loss"]) for tokens in batches
        ]
        trained = [np.array(x) for x in jax.tree.leaves(replica.params)]
        batch = {"tokens": batches[0], "weights": weights}
        sums = trainer.eval_step(replica.params, batch)
        anchors = {f: put(exchange, plan, f, noise) for f in range(RUN.sync.fragments)}
        exchange.start(
            {f: put(exchange, plan, f, first) for f in range(RUN.sync.fragments)}
        )
        for fragment in range(RUN.sync.fragments):
            replica.judge(fragment, "reset")
        exchange.start(anchors)
        taken = []
        for number, takes, keep in (
            (0, True, True),
            (1, False, False),
            (2, True, False),
        ):
            for fragment in range(RUN.sync.fragments):
                if takes:
                    taken.append(replica.take(fragment))
                    replica.judge(fragment, "settled")
                payload = exchange.layouts_down[fragment].pack(changes[fragment])
                publish = exchange.put_publish(fragment, payload)
                version = Version(1, number + 1)
                arrival = Arrival(
                    fragment=fragment, version=version, publishes=(publish,)
                )
                replica.adopt(arrival, keep=keep)
    logging.getLogger("jax").removeHandler(counter)
    after = list(anchors_of(exchange, plan).values())
    return {
        "losses": losses,
        "eval": float(sums[0]) / float(sums[1]),
        "moved": np.concatenate([np.ravel(x) for x in trained]),
        "taken": digest(taken),
        "adopted": digest(replica.params),
        "anchors": digest(after),
        "anchors_in": sorted({x.sharding.memory_kind for x in after}),
        "compiled_late": counter.count,
        "steps_compiled": trainer._step._cache_size(),
    }


def put(exchange, plan, fragment, params) -> tuple[jax.Array, ...]:
    pieces = plan.fragments[fragment]
    payload = b"".join(np.asarray(get_piece(params, p)).tobytes() for p in pieces)
    return exchange.put_anchor(fragment, payload)


def digest(tree: object) -> str:
    sha = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        sha.update(np.ascontiguousarray(leaf).data)
    return sha.hexdigest()[:16]


def compile_all(config: IslandConfig) -> dict[str, object]:
    """Collectives of the step, and by kind of piece those of its functions."""
    model, trainer = build_trainer(RUN, config)
    state, pieces, seen = trainer.abstract_state(), {}, set()
    for piece in build_plan(RUN, model).pieces:
        leaf = get_piece(state.params, dataclasses.replace(piece, layer=-1, bands=None))
        kind = PiecePrograms.of(RUN.sync, piece, leaf, config.anchor_memory)
        if kind in seen:
            continue
        seen.add(kind)
        pieces[piece.name] = {
            "cut": [axis for axis in kind.piece.spec if axis],
            "octets_cut": [axis for axis in kind.encoded.spec if axis],
            **{name: collectives(text(kind.lower(name))) for name in kind.names},
        }
    step = text(trainer.lower(RUN.sequence_length))
    return {"step": collectives(step), "reduced": reduced(step), "pieces": pieces}


def text(lowered: jax.stages.Lowered) -> str:
    return lowered.compile().as_text()


def collectives(program: str) -> list[str]:
    return sorted(set(COLLECTIVE.findall(program)))


def reduced(program: str) -> dict[int, int]:
    """By how many devices sum it together: elements of matrices, loops counted once."""
    found: dict[int, int] = {}
    for line in program.splitlines():
        result, is_sum, _ = line.partition(" all-reduce(")
        if is_sum:
            size = group_size(line, jax.device_count())
            matrices = re.findall(r"f32\[(\d+),(\d+)\]", result)
            elements = sum(int(rows) * int(columns) for rows, columns in matrices)
            found[size] = found.get(size, 0) + elements
    return found


def run_all() -> dict[str, object]:
    batches = np.random.default_rng(0).integers(0, 256, (3, 8, 17)).astype(np.int32)
    found: dict[str, object] = {}
    for shape, options in {
        "1x1x1": {},
        "2x2x1": {"anchor_memory": "pinned_host", "accumulation": 2},
        "2x2x2": {"loss_chunk": 6},
        "1x4x1": {},
    }.items():
        if shape == "1x4x1":
            # As if every piece were large: those that it cuts inside tiles, too.
            mesh.LARGE = 0
        config = island(shape, **options)
        found[shape] = {**train(config, batches), **compile_all(config)}
    expected = found["1x1x1"]["moved"]
    for result in found.values():
        moved = result.pop("moved")
        result["distance"] = float(
            np.linalg.norm(moved - expected) / np.linalg.norm(expected)
        )
    found["splash"] = splash_on_a_mesh()
    found["stacks"] = stacks_on_a_mesh()
    found["codecs"] = codecs_on_a_mesh()
    found["spread"] = {
        f"{shape} on {hosts}": spread_over_hosts(shape, hosts)
        for shape, hosts in (
            ("1x4x1", 2),
            ("2x2x2", 4),
            ("4x2x1", 8),
            ("2x1x2", 2),
            ("1x6x1", 3),
            ("3x1x2", 2),
        )
    }
    return found


def spread_over_hosts(shape: str, hosts: int) -> list[str]:
    """Put what each of several hosts fetches on its devices, and move it; return the
    pieces that then are not the whole."""
    config, wrong = dataclasses.replace(island(shape), batch_size=24), []
    per_host = config.devices // hosts
    mesh.host_of = lambda device: device.id // per_host
    mesh.spread_of.cache_clear()
    model, trainer = build_trainer(RUN, config)
    state, plan = trainer.abstract_state(), build_plan(RUN, model)
    codec, random = get_codec(RUN.sync.codec_down), np.random.default_rng(0)

    def kind(piece):
        leaf = get_piece(state.params, dataclasses.replace(piece, layer=-1, bands=None))
        return PiecePrograms.of(RUN.sync, piece, leaf, config.anchor_memory)

    for pieces in plan.fragments:
        kinds = [kind(piece) for piece in pieces]
        spreads = [(k.spread, p.grid) for k, p in zip(kinds, pieces, strict=True)]
        parts = mesh.parts_by_host(spreads)
        for number, (piece, own) in enumerate(zip(pieces, kinds, strict=True)):
            value = random.normal(size=piece.shape).astype("<f4")
            tiles = np.array(codec.encode(value))
            bits = np.array(TileGrid.of(piece.shape).split(value)).view(np.uint32)
            (encoded,) = own.gathered((land_all(own, number, parts, tiles),))
            anchor = own.gather_anchor((land_all(own, number, parts, bits),))
            right = encoded.sharding == own.encoded and anchor.sharding == own.piece
            right &= np.array_equal(encoded, tiles) and np.array_equal(anchor, value)
            for array, expected in ((encoded, tiles), (anchor, value)):
                for shard in array.addressable_shards:
                    right &= np.array_equal(shard.data, expected[shard.index])
            wrong += [] if right else [piece.name]
    return wrong


def land_all(kind, number, parts, tiles):
    """Land one piece on the devices of all hosts."""
    boxes = {}
    for host, part in parts.items():
        for box in part:
            if box.piece == number and box.start != box.stop:
                at = (box.start, box.stop)
                row = kind.spread.row_of(host, at) if kind.spread.moved else 0
                assert (row, at) not in boxes
                boxes[row, at] = tiles[tiles_of(box)]
    if not kind.spread.moved:
        return jax.device_put(tiles, kind.encoded)
    return land(kind.spread, tiles.shape, tiles.dtype, boxes)


def stacks_on_a_mesh() -> list[bool]:
    """Tell of each array of a life with stacks if it is as on one device."""
    grid = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2)

    def place(value):
        spec = PartitionSpec("x") if value.ndim > 1 else PartitionSpec()
        return jax.device_put(value, NamedSharding(grid, spec))

    sync = SyncConfig(fragments=test_held.P, codec_up="int4", codec_down="int8")
    (_, one), (_, four) = (
        test_held.everything(sync, place=how) for how in (test_held.anywhere, place)
    )
    return [np.array_equal(a, b) for a, b in zip(one, four, strict=True)]


def codecs_on_a_mesh() -> dict[str, bool]:
    """Tell of each codec if a mesh that cuts between tiles gives the bytes and the
    residual of one device, and if no chip needs anything of another."""
    grid = jax.make_mesh((2, 2), ("x", "y"), (AxisType.Auto,) * 2)
    where = NamedSharding(grid, PartitionSpec("x", "y"))
    random, found = np.random.default_rng(0), {}
    pair = [random.normal(size=(64, 2048)).astype("<f4") for _ in range(2)]
    for name in family_members.names(CODECS, "codecs"):
        encode = functools.partial(encode_with_feedback, Codec(name))
        cut = [jax.device_put(value, where) for value in pair]
        program = jax.jit(encode, out_shardings=where).lower(*cut).compile()
        same = map(np.array_equal, encode(*pair), program(*cut))
        found[family_members.brief(name)] = all(same) and not collectives(
            program.as_text()
        )
    return found


def splash_on_a_mesh() -> list[float]:
    """Largest differences between kernel and formula: key heads that the mesh cuts,
    and some that it does not."""
    layout = mesh.layout(mesh.make_mesh(island("1x2x4")))
    random = np.random.default_rng(0)
    differences = []
    for key_heads in (4, 2):
        query, key, value = (
            random.normal(size=(4, 128, heads, 32)).astype("<f4")
            for heads in (8, key_heads, key_heads)
        )
        kernel, formula = (
            np.array(
                jax.jit(functools.partial(ATTENTION[name], layout))(query, key, value)
            )
            for name in ("splash", "dot_product")
        )
        differences.append(float(np.abs(kernel - formula).max()))
    return differences


if __name__ == "__main__":
    print(json.dumps(run_all()))
