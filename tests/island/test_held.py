"""Small tensors in stacks: the bits of pieces apart, in fewer programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_exchange import V1, anchors_of

from diloco_jax.config import SyncConfig
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.fragments import plan_fragments
from diloco_jax.core.tiles import TileGrid
from diloco_jax.island.device import exchange as exchange_module
from diloco_jax.island.device.build import compile_programs
from diloco_jax.island.device.exchange import (
    Exchange,
    LentBeside,
    WatchedModel,
    rows_of,
)
from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.island.device.programs import NAMES
from diloco_jax.island.mailbox import Arrival

P = 4
SHAPES = {
    "alone": (7,),
    **{f"weight_{n:02}": (6, 4) for n in range(22)},
    **{f"bias_{n:02}": (8,) for n in range(9)},
}
AXES = {name: (None,) * len(shape) for name, shape in SHAPES.items()}
PLAN = plan_fragments(SHAPES, AXES, P)


def values(seed):
    random = np.random.default_rng(seed)
    return {
        name: random.normal(size=shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def anywhere(value):
    return jnp.array(value)


def lent(seed, place):
    return {name: place(value) for name, value in values(seed).items()}


def landed_anchor(exchange, fragment, seed):
    tree, part = values(seed), exchange.part_down(fragment)
    tiles = [
        TileGrid.of(piece.shape).to_tiles(tree[piece.path[0]])
        for piece in PLAN.fragments[fragment]
    ]
    own = exchange.layouts_down[fragment].cut_values(tiles, part)
    return exchange.put_anchor(fragment, b"".join(x.tobytes() for x in own))


def landed_publish(exchange, fragment, seed, codec):
    tree, part = values(seed), exchange.part_down(fragment)
    encoded = [
        np.asarray(get_codec(codec).encode(tree[piece.path[0]]))
        for piece in PLAN.fragments[fragment]
    ]
    layout = exchange.layouts_down[fragment]
    own = layout.cut(layout.pack(encoded), part)
    return exchange.put_publish(fragment, b"".join(x.tobytes() for x in own))


def made(sync, memory, place):
    leaves = LikeLeaves(lent(0, place))
    exchange = Exchange(PLAN, sync, leaves.zeros(), memory)
    exchange.start({f: landed_anchor(exchange, f, 1) for f in range(P)})
    return exchange, leaves


def everything(sync, memory="device", place=anywhere, fetch=jax.device_get):
    """Return the arrays that a life of an island comes to, of every kind."""
    exchange, leaves = made(sync, memory, place)
    watched = WatchedModel(exchange, leaves.like, "bfloat16")
    island = LentBeside(exchange, leaves.as_listed(lent(2, place)))
    island.beside = [leaves.as_beside(lent(3, place))]
    found = {}
    for fragment in range(P):
        found[fragment, "taken"] = exchange.take(fragment, island.params)
        publishes = tuple(
            landed_publish(exchange, fragment, seed, sync.codec_down) for seed in (4, 5)
        )
        chain = Arrival(fragment=fragment, version=V1, publishes=publishes)
        whole = landed_anchor(exchange, fragment, 6)
        island.adopt(chain, keep=True)
        found[fragment, "kept"] = fetch(island.params)
        island.judge(fragment, "settled")
        found[fragment, "again"] = island.take(fragment)
        island.adopt(Arrival(fragment=fragment, version=V1, anchor=whole), keep=False)
        found[fragment, "residuals"] = exchange.trees().get("residuals")
        found[fragment, "anchor"] = exchange.anchor(fragment)
        watched.copy(fragment)
    island.take(0)
    island.judge(0, "reset")
    if exchange.feeds_back:
        found["residuals"] = leaves.as_tree(exchange.residuals(leaves.zeros()))
        apart = exchange.trees()["residuals"]
        for like, array in zip(
            jax.tree.leaves(exchange.like_residuals()),
            jax.tree.leaves(apart),
            strict=True,
        ):
            assert (like.shape, like.dtype) == (array.shape, array.dtype)
            assert like.sharding.is_equivalent_to(array.sharding, array.ndim)
        exchange.start({}, {f: exchange.together(f, apart[f]) for f in range(P)})
        found["restored"] = exchange.trees()["residuals"]
    found |= {"params": island.params, "watched": watched.params}
    found |= {"beside": island.beside[0], "anchors": anchors_of(exchange, PLAN)}
    return exchange, jax.tree.leaves(fetch(list(found.values())))


@pytest.mark.parametrize(
    ("options", "memory"),
    [
        ({"codec_up": "int4", "codec_down": "int8"}, "device"),
        (
            {"adopt": "blend", "blend_alpha": 0.3, "error_feedback": False},
            "pinned_host",
        ),
    ],
)
def test_stacks_have_the_bits_of_pieces_apart(options, memory, monkeypatch):
    sync = SyncConfig(fragments=P, **options)
    exchange, stacked = everything(sync, memory)
    assert {h.programs.rows for f in range(P) for h in exchange.held(f)} == {1, 6}
    monkeypatch.setattr(exchange_module, "SMALL", 0)
    exchange, apart = everything(sync, memory)
    assert {h.programs.rows for f in range(P) for h in exchange.held(f)} == {1}
    assert len(stacked) == len(apart) > 100
    for a, b in zip(stacked, apart, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def counted(exchange):
    """Have the programs of an exchange counted, and the arrays that they return."""
    count = {"programs": 0, "arrays": 0}

    def counting(program):
        def call(*arguments):
            result = program(*arguments)
            count["programs"] += 1
            count["arrays"] += len(jax.tree.leaves(result))
            return result

        return call

    for fragment in range(len(exchange.layouts_up)):
        for one in exchange.held(fragment):
            for name in NAMES:
                vars(one.programs)[name] = counting(getattr(one.programs, name))
    return count


def test_a_boundary_of_hundreds_of_small_tensors_starts_two_programs(caplog):
    """The loop of `benchmarks/boundary.py`: 300 parameters, P = 24."""
    shapes = {f"block_{n:03}": {"weight": (4, 4)} for n in range(300)}
    axes = {name: {"weight": (None, None)} for name in shapes}
    plan = plan_fragments(shapes, axes, 24)
    leaves = LikeLeaves(
        {name: {"weight": jnp.ones((4, 4))} for name in shapes},
    )
    exchange = Exchange(plan, SyncConfig(fragments=24), leaves.zeros())
    with jax.log_compiles(), caplog.at_level("WARNING"):
        compile_programs([*exchange.lower_all()])
    compiled = [r.message for r in caplog.records if "Compiling" in r.message]
    assert len(compiled) == len(NAMES) + 1, "each once, `unstack` too"
    zeros = {
        f: exchange.put_anchor(f, bytes(exchange.anchor_bytes(f))) for f in range(24)
    }
    exchange.start(zeros)
    params, count = leaves.zeros(), counted(exchange)
    exchange.take(0, params)
    # Thirteen encoded pieces, and one stack each of bases and residuals.
    assert count == {"programs": 1, "arrays": 15}
    count.update(programs=0, arrays=0)
    octets = bytes(exchange.layouts_down[1].total_bytes)
    publishes = (exchange.put_publish(1, octets),)
    exchange.adopt(Arrival(fragment=1, version=V1, publishes=publishes), params)
    # Thirteen parameters, and a stack of anchors.
    assert count == {"programs": 1, "arrays": 14}


@pytest.mark.parametrize(
    ("counts", "rows"),
    [
        ([13] * 12 + [12] * 12, 13),
        ([3] * 17 + [2] * 7, 3),
        ([60] + [1] * 23, 1),  # No island holds rows by the hundred to no end.
        ([1] * 24, 1),
        ([300], 64),
        ([2], 2),
    ],
)
def test_stacks_have_few_rows_to_spare(counts, rows):
    assert rows_of(counts) == rows
