"""Takes and adoptions against the functions of core/, bit for bit; trees beside the
parameters are moved by what an adoption changes in these."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pieces import publish

from diloco_jax.config import IslandConfig, SyncConfig
from diloco_jax.core.changes import adopt, apply_publish, delta, moved
from diloco_jax.core.codecs import encode_with_feedback, get_codec
from diloco_jax.core.families import ADOPT_RULES
from diloco_jax.core.fragments import get_piece, plan_fragments
from diloco_jax.island.device.build import compile_programs
from diloco_jax.island.device.exchange import Exchange, LentBeside
from diloco_jax.island.device.like import LikeLeaves
from diloco_jax.island.device.mesh import make_mesh, param_shardings
from diloco_jax.island.mailbox import Arrival
from diloco_jax.protocol.messages import Version

AXES = {
    "embedding": ("vocab", "embed"),
    "layers": {"w": ("layers", "embed", "mlp"), "v": ("layers", "embed", "mlp")},
    "norm": ("embed",),
}
SHAPES = {
    "embedding": (16, 8),
    "layers": {"w": (3, 8, 12), "v": (3, 8, 12)},
    "norm": (8,),
}
PLAN = plan_fragments(SHAPES, AXES, 3)
V1 = Version(1, 1)


def random_params(seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: random.normal(size=shape).astype(np.float32),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def place(params):
    mesh = make_mesh(IslandConfig())
    return jax.device_put(params, param_shardings(mesh, AXES, params), may_alias=False)


def full_payload(params, fragment):
    pieces = PLAN.fragments[fragment]
    return b"".join(get_piece(params, piece).tobytes() for piece in pieces)


def publish_payload(exchange, fragment, encoded):
    return exchange.layouts_down[fragment].pack([np.asarray(x) for x in encoded])


def start(sync, anchor, memory="device"):
    exchange = Exchange(PLAN, sync, place(anchor), memory)
    exchange.start(
        {f: exchange.put_anchor(f, full_payload(anchor, f)) for f in range(3)}
    )
    return exchange


def anchors_of(exchange, plan=PLAN):
    """Anchors by the name of the piece."""
    pieces = exchange._pieces(lambda state: state.apart(state.anchor))
    found = itertools.chain.from_iterable(pieces)
    return {p.name: a for p, a in zip(plan.pieces, found, strict=True)}


def same(a, b):
    np.testing.assert_array_equal(
        np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
    )


@pytest.mark.parametrize(
    ("rule", "codec"),
    [("rebase", "f32"), ("rebase", "int8"), ("overwrite", "bf16"), ("blend", "int2")],
)
def test_take_and_adopt_are_those_of_core(rule, codec):
    sync = SyncConfig(
        fragments=3, adopt=rule, codec_up=codec, codec_down=codec, blend_alpha=0.3
    )
    anchor, taken, later, theta = map(random_params, range(4))
    exchange = start(sync, anchor)
    coder = get_codec(codec)
    encoded = [exchange.take(f, place(taken)) for f in range(3)]
    params = place(later)
    for fragment, pieces in enumerate(PLAN.fragments):
        published = []
        for piece, sent in zip(pieces, encoded[fragment], strict=True):
            a, local = (jnp.asarray(get_piece(x, piece)) for x in (anchor, taken))
            want, _ = encode_with_feedback(coder, delta(a, local), jnp.zeros_like(a))
            same(sent, want)
            published.append(publish(coder, jnp.asarray(get_piece(theta, piece)), a)[0])
        on_device = exchange.put_publish(
            fragment, publish_payload(exchange, fragment, published)
        )
        arrival = Arrival(fragment=fragment, version=V1, publishes=(on_device,))
        params = exchange.adopt(arrival, params)
        for piece, publication in zip(pieces, published, strict=True):
            a, b, local = (
                jnp.asarray(get_piece(x, piece)) for x in (anchor, taken, later)
            )
            new_anchor = apply_publish(coder, a, publication)
            same(anchors_of(exchange)[piece.name], new_anchor)
            want = adopt(ADOPT_RULES.find(rule), local, b, new_anchor, np.float32(0.3))
            same(get_piece(params, piece), want)


def test_a_chain_is_adopted_once_against_the_old_base():
    sync = SyncConfig(fragments=3, codec_down="int8")
    anchor, local, *thetas = map(random_params, range(4))
    exchange = start(sync, anchor)
    coder = get_codec("int8")
    (piece, *_), publishes = PLAN.fragments[0], []
    anchors = {p: jnp.asarray(get_piece(anchor, p)) for p in PLAN.fragments[0]}
    for theta in thetas:
        step = []
        for p in PLAN.fragments[0]:
            sent, anchors[p] = publish(
                coder, jnp.asarray(get_piece(theta, p)), anchors[p]
            )
            step.append(sent)
        publishes.append(exchange.put_publish(0, publish_payload(exchange, 0, step)))
    arrival = Arrival(fragment=0, version=V1, publishes=tuple(publishes))
    params = exchange.adopt(arrival, place(local))
    old = jnp.asarray(get_piece(anchor, piece))
    want = adopt(
        ADOPT_RULES.find("rebase"),
        jnp.asarray(get_piece(local, piece)),
        old,
        anchors[piece],
        0.5,
    )
    same(get_piece(params, piece), want)


def piece_of(*trees):
    """The first piece of fragment 0 of each."""
    return [jnp.asarray(get_piece(tree, PLAN.fragments[0][0])) for tree in trees]


def whole(exchange, values, fragment=0):
    """The arrival of these values as the fragment's anchor in full."""
    anchor = exchange.put_anchor(fragment, full_payload(values, fragment))
    return Arrival(fragment=fragment, version=V1, anchor=anchor)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_a_version_without_the_last_take_is_adopted_beside_it(memory):
    """The take stays in the parameters until the version after it, in whose place it
    leaves them; taken again meanwhile, it is in the delta."""
    first, taken, later, *anchors = map(random_params, range(5))
    sync = SyncConfig(fragments=3, codec_up="f32")
    exchange = start(sync, first, memory)
    for fragment, layout in enumerate(exchange.layouts_whole):
        sent = layout.pack([np.asarray(x) for x in exchange.anchor(fragment)])
        for placed, encoded in zip(layout.placed, layout.unpack(sent), strict=True):
            decoded = get_codec("f32").decode(encoded, placed.piece.shape)
            same(decoded, get_piece(first, placed.piece))  # As it went in.
    exchange.take(0, place(taken))
    params = exchange.adopt(whole(exchange, anchors[0]), place(later), keep=True)
    before, base, local, beside, after = piece_of(first, taken, later, *anchors)
    kept = moved(local, before, beside)
    same(piece_of(params)[0], kept)
    params = exchange.adopt(whole(exchange, anchors[1]), params)
    rebase = ADOPT_RULES.find("rebase")
    want = adopt(rebase, kept, moved(base, before, beside), after, 0.5)
    same(piece_of(params)[0], want)


def test_a_take_that_is_reopened_leaves_no_trace_and_is_in_the_next_one():
    first, taken, later, second = map(random_params, range(4))
    sync = SyncConfig(fragments=3, codec_up="int4")
    exchange, untouched = start(sync, first), start(sync, first)
    exchange.take(0, place(taken))
    exchange.judge(0, "reopened", None)
    for a, b in zip(
        *(x.take(0, place(later)) for x in (exchange, untouched)), strict=True
    ):
        same(a, b)
    plain = dataclasses.replace(sync, codec_up="f32")
    exchange = start(plain, first)
    exchange.take(0, place(taken))
    params = exchange.adopt(whole(exchange, second), place(later), keep=True)
    exchange.judge(0, "reopened", None)
    change = delta(*piece_of(second, params))
    same(exchange.take(0, params)[0], get_codec("f32").encode(change))


def test_settled_take_leaves_its_residual():
    """A checkpoint has the residual before an open take."""
    sync = SyncConfig(fragments=3, codec_up="int4")
    anchor, local = map(random_params, range(2))
    exchange = start(sync, anchor)

    def residual():
        return float(jnp.abs(exchange.trees()["residuals"][0][0]).max())

    exchange.take(0, place(local))
    assert residual() == 0
    exchange.judge(0, "settled", None)
    assert residual() > 0
    exchange.judge(0, "dropped", None)  # Nothing is left to go back to.
    coder, (a, b) = get_codec("int4"), piece_of(anchor, local)
    change = delta(a, b)
    _, left = encode_with_feedback(coder, change, jnp.zeros_like(a))
    want, _ = encode_with_feedback(coder, change, left)
    same(exchange.take(0, place(local))[0], want)


def test_reset_returns_to_the_anchor():
    anchor, local = map(random_params, range(2))
    local["layers"]["w"][:] = np.nan
    exchange = start(SyncConfig(fragments=3), anchor)
    params = place(local)
    for fragment in range(3):
        exchange.take(fragment, params)
        params = exchange.judge(fragment, "reset", params)
    for piece in PLAN.pieces:
        same(get_piece(params, piece), get_piece(anchor, piece))


def test_bases_survive_the_donation_of_the_parameters():
    anchor, local = map(random_params, range(2))
    exchange = start(SyncConfig(fragments=3), anchor)
    params = place(local)
    exchange.take(0, params)
    step = jax.jit(lambda p: jax.tree.map(lambda x: x + 1, p), donate_argnums=0)
    params = exchange.adopt(whole(exchange, anchor), step(params))
    step(params)
    assert all(bool(jnp.isfinite(a).all()) for a in anchors_of(exchange).values())


def test_nothing_compiles_after_what_is_compiled_ahead(caplog):
    anchor, local = map(random_params, range(2))
    sync = SyncConfig(fragments=3, blend_alpha=0.25)
    params = place(local)
    exchange = Exchange(PLAN, sync, params)
    jax.clear_caches()
    compile_programs([*exchange.lower_all()])
    with jax.log_compiles(), caplog.at_level("WARNING"):
        exchange.start(
            {f: exchange.put_anchor(f, full_payload(anchor, f)) for f in range(3)}
        )
        for fragment in range(3):
            exchange.take(fragment, params)
            zeros = bytes(exchange.layouts_down[fragment].total_bytes)
            publishes = (exchange.put_publish(fragment, zeros),) * 2
            arrival = Arrival(fragment=fragment, version=V1, publishes=publishes)
            params = exchange.adopt(arrival, params, keep=True)
            params = exchange.adopt(arrival, params)
            params = exchange.judge(fragment, "reset", params)
            exchange.anchor(fragment)
    assert [r.message for r in caplog.records if "Compiling" in r.message] == []


# ---- trees beside the parameters ---------------------------------------------------


def lent_at(params, *beside):
    """Parameters that are not their anchors, and trees beside them."""
    leaves = LikeLeaves(place(params))
    exchange = start(SyncConfig(fragments=3), random_params(0))
    lent = LentBeside(exchange, leaves.as_listed(place(params)))
    lent.beside = [leaves.as_beside(place_as(tree)) for tree in beside]
    return leaves, lent


def place_as(tree):
    return jax.tree.map(
        lambda x, like: jax.device_put(jnp.array(x), like.sharding), tree, place(tree)
    )


def largest(tree):
    return max(
        float(abs(np.asarray(x, np.float32)).max()) for x in jax.tree.leaves(tree)
    )


def minus(a, b):
    return jax.tree.map(lambda x, y: np.float32(x) - np.float32(y), a, b)


@pytest.mark.parametrize("fragments", [[0], [0, 1, 2]])
def test_what_is_beside_stays_as_far_from_the_parameters(fragments):
    local, average = random_params(1), random_params(2)
    low = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), local)
    leaves, lent = lent_at(local, average, low)
    lent.warm()  # It compiles, and changes nothing.
    assert largest(minus(leaves.as_tree(lent.params), local)) == 0
    before = minus(average, local)
    for fragment in fragments:
        lent.adopt(whole(lent._exchange, random_params(3), fragment), keep=False)
    params = leaves.as_tree(lent.params)
    average, low = map(leaves.as_tree, lent.beside)
    assert largest(minus(params, local)) > 0.1
    assert largest(minus(minus(average, params), before)) < 2e-6
    assert {x.dtype for x in jax.tree.leaves(low)} == {jnp.dtype(jnp.bfloat16)}
    assert largest(minus(low, params)) < 0.05


def test_a_fragment_that_is_not_adopted_stays_to_the_bit():
    local, average = random_params(1), random_params(2)
    leaves, lent = lent_at(local, average)
    lent.adopt(whole(lent._exchange, random_params(3)), keep=False)
    (moved,) = map(leaves.as_tree, lent.beside)
    for piece in PLAN.pieces:
        here, there = (get_piece(tree, piece) for tree in (moved, average))
        assert np.array_equal(here, there) == (piece not in PLAN.fragments[0])


def test_a_reset_replaces_what_is_not_finite():
    local = random_params(1)
    local["norm"][:] = np.nan
    leaves, lent = lent_at(local, local)
    for fragment in range(3):
        lent.judge(fragment, "reset")
    assert largest(minus(leaves.as_tree(lent.params), random_params(0))) == 0
    assert largest(minus(leaves.as_tree(lent.beside[0]), random_params(0))) < 1e-6


def test_what_cannot_be_beside_is_named():
    leaves = LikeLeaves({"w": jnp.ones(4)})
    leaves.as_beside({"w": jnp.ones(4, jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"w is int32\[4\] .* floating dtype"):
        leaves.as_beside({"w": jnp.ones(4, jnp.int32)})
    with pytest.raises(ValueError, match=r"w is float32\[3\]"):
        leaves.as_beside({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="alongside was given"):
        leaves.as_beside([jnp.ones(4)])
