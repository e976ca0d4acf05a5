"""The functions in C make the bits of those that XLA compiles, whatever the sizes."""

import dataclasses
import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from merges import assert_same, merged, merger, same_bits
from xxhash import xxh3_128

from diloco_jax.compilation import passes_of
from diloco_jax.core import changes, outer, tiles
from diloco_jax.core.changes import publish_tiles
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import CODECS
from diloco_jax.core.merging import Encoded
from diloco_jax.core.outer import OuterSettings, native_step
from diloco_jax.core.tiles import CODECS as KNOWN
from diloco_jax.core.tiles import Passes, Step, digest_arrays, named, tile_bytes

pytestmark = pytest.mark.optimized

SIZES = (1, 33, 100, 257, 2049, 4102, 16384, 40_001)
"""Elements of a tile: odd ones, a power of two, parts of blocks, of chunks and of runs.
XLA compiles everything anew for each."""
sizes, codecs, seeds = (
    st.sampled_from(SIZES),
    st.sampled_from(KNOWN),
    st.integers(0, 2**32 - 1),
)
some = settings(max_examples=25, deadline=None)


@pytest.fixture(scope="module")
def passes() -> Passes:
    found = passes_of("native")
    assert found is not None
    return found


def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Values of one size, or of all sizes that f32 has, zeros and subnormals too."""
    values = rng.standard_normal(shape)
    if rng.random() < 0.5:
        values *= 10.0 ** rng.uniform(-46, 4, shape)
        values[rng.random(shape) < 0.1] = 0
    return values.astype(np.float32)


def deltas(rng: np.random.Generator, codec: str, count: int, shape: tuple[int, int]):
    encode = get_codec(codec).encode_tiles
    return [np.asarray(encode(drawn(rng, shape))) for _ in range(count)]


def test_they_know_the_codecs_of_the_package() -> None:
    assert set(KNOWN) == set(CODECS.table)
    for codec, elements in itertools.product(KNOWN, SIZES):
        assert tile_bytes(codec, elements) == get_codec(codec).tile_bytes(elements)


@some
@given(codec=codecs, elements=sizes, seed=seeds)
def test_squares(passes, codec, elements, seed) -> None:
    (delta,) = deltas(np.random.default_rng(seed), codec, 1, (2, elements))
    decoded = get_codec(codec).decode_tiles(delta, elements)
    assert passes.tile_squares(codec, delta, elements) == changes.tile_squares(decoded)
    exact = np.sum(np.square(np.asarray(decoded), dtype=np.float64))
    found = sum(passes.tile_squares(codec, delta, elements))
    assert found == pytest.approx(float(exact), rel=1e-12)


def test_squares_of_a_large_tile_need_no_array_of_its_size(passes) -> None:
    """Pages that are new each time cost more than the arithmetic."""
    elements = 1001 * 1003
    encoded = np.zeros((1, tile_bytes("int8", elements)), np.uint8)
    tracemalloc.start()
    try:
        assert passes.tile_squares("int8", encoded, elements) == [0.0]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < elements / 10


@some
@given(codec=codecs, elements=sizes, count=st.integers(1, 64), seed=seeds)
def test_sum(passes, codec, elements, count, seed) -> None:
    rng, shape = np.random.default_rng(seed), (2, elements)
    encoded = deltas(rng, codec, count, shape)
    factors = rng.random(count).tolist()
    ours, theirs = (np.empty(shape, np.float32) for _ in range(2))
    squares = passes.sum(codec, encoded, factors, ours)
    oracle = _InTiles(get_codec(codec), shape, encoded)
    assert squares == oracle.weighted_sum(factors, theirs)
    same_bits(ours, theirs)


class _InTiles(Encoded):
    """Deltas of which each row is a tile, whatever the grid of that shape is."""

    @property
    def _elements(self) -> int:
        return self.shape[-1]


@some
@given(
    codec=codecs,
    elements=sizes,
    kind=st.sampled_from(("keep", "flush", "sgd", "nesterov")),
    guard=st.sampled_from((0.0, 0.9)),
    merges=st.sampled_from((0, 5)),
    still=st.booleans(),
    seed=seeds,
)
def test_step_and_publish(
    passes, codec, elements, kind, guard, merges, still, seed
) -> None:
    """still: the publish has nothing to say."""
    rng, shape = np.random.default_rng(seed), (2, elements)
    total, old, trace, anchor = (drawn(rng, shape) for _ in range(4))
    factor, norm = np.float32(rng.random()), np.float32(7.5)
    delta = total * factor
    chosen = OuterSettings(
        optimizer="nesterov" if kind == "nesterov" else "sgd",
        learning_rate=0.41,
        momentum=0.6,
        warmup_merges=7,
        norm_guard=guard,
    )
    tx = outer.make_outer(chosen)
    state = jax.tree.map(
        lambda x: trace if x.shape == shape else x, tx.init((jnp.zeros(shape),))
    )
    state["rate"] = state["rate"]._replace(count=jnp.asarray(merges, jnp.int32))
    if guard:
        state["guard"] = outer.GuardState(
            jnp.asarray(merges, jnp.int32), jnp.asarray(6.25)
        )
    after, held, step = state, None, Step(kind="keep")
    if kind == "keep":
        (theta,) = (old + delta,)
    elif kind == "flush":
        (theta,) = outer.flush_step((old,), (delta,))
        step = Step(kind="flush", factor=float(factor))
    else:
        (theta,), after = outer.outer_step(tx, (old,), state, (delta,), norm)
        step, held = native_step(chosen, state, float(factor), norm, np.empty)
    if still:
        anchor = np.array(theta)
    ours = np.array(theta) if kind == "keep" else total.copy()
    encoded, moved = publish_tiles(get_codec(codec), theta, anchor)
    octets, new_anchor = np.empty(encoded.shape, np.uint8), np.empty_like(anchor)
    passes.finish(
        codec,
        step,
        old=old,
        anchor=anchor,
        theta=ours,
        new_anchor=new_anchor,
        encoded=octets,
    )
    for one, other in ((ours, theta), (octets, encoded), (new_anchor, moved)):
        same_bits(one, other)
    if held is not None:
        jax.tree.map(same_bits, held, after)


def test_a_delta_that_is_not_finite_has_squares_that_are_not(passes) -> None:
    for codec, wrong in itertools.product(KNOWN, (np.nan, np.inf, -np.inf)):
        values = np.ones((2, 300), np.float32)
        values[1, 299] = wrong
        encoded = np.asarray(get_codec(codec).encode_tiles(values))
        assert not np.isfinite(passes.tile_squares(codec, encoded, 300)).all()


def test_arrays_that_do_not_agree_are_refused(passes) -> None:
    encoded = np.zeros((2, 304), np.uint8)
    with pytest.raises(ValueError, match=r"uint8\[2, 304\].*for a.*uint8\[2, 202\]"):
        passes.tile_squares("int8", encoded, 200)
    total = np.zeros((300, 2), np.float32).T
    with pytest.raises(ValueError, match=r"float32\[2, 300\] with strides"):
        passes.sum("int8", [encoded], [1.0], total)


# ---- whole merges -----------------------------------------------------------------


@pytest.mark.parametrize("codec", KNOWN)
@pytest.mark.parametrize("optimizer", ["nesterov", "sgd", "adam"])
def test_merges_are_those_of_the_other_route(passes, codec, optimizer) -> None:
    for rule in ("rda", "mean") if optimizer != "adam" else ("rda",):
        made = [
            merged(merger(rule, optimizer, codec, p), flush=True)
            for p in (passes, None)
        ]
        assert_same(*made)


@pytest.mark.parametrize("rule", ["trimmed_mean", "rda"])
def test_what_the_functions_do_not_have_goes_by_the_other_route(
    passes, rule, monkeypatch
) -> None:
    monkeypatch.setattr("diloco_jax.core.outer.Nesterov.native_step", None)
    made = [merged(merger(rule, passes=p), flush=True) for p in (passes, None)]
    assert_same(*made)


@pytest.mark.parametrize("codec", KNOWN)
@pytest.mark.parametrize("optimizer", ["nesterov", "sgd"])
@pytest.mark.parametrize("guard", [0.0, 10.0, 0.3])
def test_publishes_are_applied_as_by_the_other_route(
    passes, codec, optimizer, guard
) -> None:
    """The last guard cuts what a publish says."""
    chosen = merger("rda", optimizer, codec)
    chosen = dataclasses.replace(
        chosen,
        settings=dataclasses.replace(
            chosen.settings, norm_guard=guard, warmup_merges=2
        ),
    )
    routes = [dataclasses.replace(chosen, passes=p) for p in (passes, None)]
    start = chosen.begin([np.ones(p.shape, np.float32) for p in chosen.pieces])
    rng, kept = np.random.default_rng(3), []
    payloads = [
        chosen.layout_down.pack(
            [get_codec(codec).encode(drawn(rng, p.shape) * size) for p in chosen.pieces]
        )
        for size in (1.0, 1.0, 1.0, 9.0, 1.0, 1.0)
    ]
    for route in routes:
        state, found = start, []
        for number, payload in enumerate(payloads):
            digest = xxh3_128()
            final = number == len(payloads) - 1
            state = route.replay(state, payload, final=final, digest=digest)
            assert named(digest) == digest_arrays(state.theta)
            found.append(state)
        kept.append(found)
    jax.tree.map(same_bits, *kept)


def test_neither_blocks_nor_threads_change_a_bit(passes, monkeypatch) -> None:
    whole = merged(merger(passes=passes))
    with ThreadPoolExecutor(4) as pool:
        divided = Passes(passes.path, pool.map)
        for elements in (1, 5000):
            monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", elements)
            assert_same(merged(merger(passes=divided)), whole)
