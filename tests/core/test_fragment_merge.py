"""A merge has the same bits however it is cut, its memory is that of the fragment,
and its measures are what their definitions give in float64."""

import itertools
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from merges import PIECES, assert_same, merged, merger

from diloco_jax.core import tiles
from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import CODECS, MERGE_RULES
from diloco_jax.core.fragment_merge import (
    SAMPLED,
    MergeMeasures,
    Routing,
    measure,
    measure_routing,
    norm_of,
    sample,
    sample_bytes,
    sampled,
)
from diloco_jax.core.fragments import Piece
from diloco_jax.core.merging import Encoded, merge_piece
from diloco_jax.core.tiles import ArrayLike, TileGrid


@pytest.mark.parametrize("rule", ["rda", "mean", "trimmed_mean"])
@pytest.mark.parametrize("optimizer", ["nesterov", "sgd"])
def test_the_size_of_blocks_changes_no_bit(rule, optimizer, monkeypatch) -> None:
    whole = merged(merger(rule, optimizer))
    for elements in (1, 5000):
        monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", elements)
        assert_same(merged(merger(rule, optimizer)), whole)


def test_a_publish_that_is_replayed_advances_momentum_and_guard() -> None:
    merge, rng = merger(), np.random.default_rng(0)
    state = merge.begin([rng.standard_normal(p.shape, np.float32) for p in PIECES])
    for number in range(1, 6):
        arrays = [
            merge.down.encode(rng.standard_normal(p.shape, np.float32) * number)
            for p in PIECES
        ]
        payload, before = merge.layout_down.pack(arrays), state
        state = merge.replay(state, payload, final=False)
        assert [int(own["guard"].merges) for own in state.outer] == [number] * 3
        for own, old, array in zip(state.anchor, before.anchor, arrays, strict=True):
            decoded = merge.down.decode_tiles(array.reshape(len(own), -1), own.shape[1])
            np.testing.assert_array_equal(own, old + decoded)
    flushed = merge.replay(state, payload, final=True)
    assert_same(flushed.outer, state.outer)


def test_an_optimizer_that_sees_whole_fragments_takes_the_same_steps(
    monkeypatch,
) -> None:
    one = merged(merger())[-1]
    monkeypatch.setattr("diloco_jax.core.outer.Nesterov.elementwise", False)
    other = merged(merger())[-1]
    assert one.norm == pytest.approx(other.norm, rel=1e-6)
    for ours, theirs in zip(one.state.theta, other.state.theta, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_a_merge_leaves_the_state_that_it_was_given() -> None:
    merge, rng = merger(), np.random.default_rng(1)
    state = merged(merge)[-1].state
    before = jax.tree.map(np.array, state)
    arrays = [merge.up.encode(rng.standard_normal(p.shape)) for p in PIECES]
    payload = merge.layout_up.pack(arrays)
    squares = [merge.squares(payload)]
    for _ in range(3):
        merge.merge(state, [payload], squares, [1], share=1.0, final=False, last=())
    jax.tree.map(np.testing.assert_array_equal, state, before)


def test_deltas_are_decoded_a_block_at_a_time(monkeypatch) -> None:
    """So the memory of a merge does not follow the islands."""
    monkeypatch.setattr(tiles, "BLOCK_ELEMENTS", 5000)
    decode, made = Encoded.tiles, []

    def noted(deltas: Encoded, island: int, rows: slice) -> ArrayLike:
        found = decode(deltas, island, rows)
        if rows.step:  # Samples of all deltas are looked at together.
            return found
        made.append(weakref.ref(found))
        assert found.size <= 5000
        assert sum(one() is not None for one in made) <= 2
        return found

    monkeypatch.setattr(Encoded, "tiles", noted)
    merged(merger())
    assert made


ONE_CORE = """
import os
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
from test_fragment_merge import large_digest
print(large_digest())
"""


def large_digest() -> str:
    """Merge a piece that XLA divides among threads; return the digest of Theta."""
    large = Piece(("w",), -1, (1024, 2048), False)
    return merged(merger(pieces=(large,)), merges=2)[-1].digest


def test_the_number_of_cores_changes_no_bit() -> None:
    folders = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", ONE_CORE],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": folders},
    )
    assert done.stdout.strip() == large_digest()


SHAPES = [(6, 5), (7,)]
WEIGHTS = [1.0, 2.0, 5.0]


def drawn(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[list]:
    """Deltas by piece and island that have something in common."""
    rng = np.random.default_rng(seed)
    pieces = []
    for shape in shapes:
        common = rng.standard_normal(shape)
        each = [common + rng.standard_normal(shape) for _ in WEIGHTS]
        pieces.append([d.astype(np.float32) for d in each])
    return pieces


def measured(
    pieces: list[list], rule: str, last: list | None = None, rate: float = 0.5
) -> tuple[MergeMeasures, tuple, list, float]:
    """Merge by that rule, take an outer step of that rate, and measure both. Return the
    sampled merged delta and its length, too."""
    weights = WEIGHTS[: len(pieces[0])]
    deltas = [Encoded.of(own) for own in pieces]
    merged = [merge_piece(MERGE_RULES.find(rule), own, weights) for own in deltas]
    samples = [sample(m.total) * np.float32(m.factor) for m in merged]
    steps = [-rate * one for one in samples]
    found = measure(deltas, merged, weights, samples, last or [], steps)
    return *found, samples, norm_of(merged)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.float64(a).ravel(), np.float64(b).ravel()
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("rule", ["rda", "mean"])
def test_the_numbers_are_what_they_say(rule: str) -> None:
    pieces = drawn(0)
    found, _, _, norm = measured(pieces, rule)
    total = weight = 0.0
    for deltas in pieces:
        pairs = list(itertools.combinations(range(3), 2))
        weights = [WEIGHTS[i] * WEIGHTS[j] for i, j in pairs]
        cosines = [cosine(deltas[i], deltas[j]) for i, j in pairs]
        total += deltas[0].size * np.average(cosines, weights=weights)
        weight += deltas[0].size
    assert found.pairwise_cosine == pytest.approx(total / weight, abs=1e-5)
    islands = zip(*pieces, strict=True)
    lengths = [np.linalg.norm([np.linalg.norm(p) for p in own]) for own in islands]
    mean = np.average(lengths, weights=WEIGHTS)
    assert found.length_ratio == pytest.approx(norm / mean, rel=1e-5)
    assert found.step_ratio == pytest.approx(0.5, rel=1e-3)
    assert found.cosine_to_last is None


def test_the_cosine_to_the_last_merge_is_over_the_whole_fragment() -> None:
    _, _, first, _ = measured(drawn(0), "rda")
    other, _, second, _ = measured(drawn(1), "rda", first)
    flat = [np.concatenate([x.ravel() for x in own]) for own in (first, second)]
    assert other.cosine_to_last == pytest.approx(cosine(*flat), abs=1e-5)
    turned, *_ = measured([[-d for d in p] for p in drawn(0)], "rda", first)
    assert turned.cosine_to_last == pytest.approx(-1, abs=1e-5)


def test_what_has_no_value_is_none() -> None:
    zeros = [[np.zeros(s, np.float32)] * 3 for s in SHAPES]
    assert measured(zeros, "rda")[:2] == (MergeMeasures(), (None,) * 3)
    found, *_ = measured([[d, 0 * d, 0 * d] for d, *_ in drawn(0)], "rda")
    assert found.pairwise_cosine is None
    assert found.length_ratio is not None
    two = measured([own[:2] for own in drawn(0)], "rda")
    assert two[1] == (), "of two, the pairwise cosine tells as much"


def test_routers_and_choices_are_compared_by_hand() -> None:
    """Of a router's piece the distance, of experts' the counts, once for a layer."""
    rng = np.random.default_rng(0)
    router = Piece(("mlp", "router"), 0, (6, 4), False, router=True)
    gate, up = (
        Piece(("mlp", name), 0, (4, 2, 3), False, expert=True, groups=4, by_use=1)
        for name in ("gate", "up")
    )
    drawn = [rng.standard_normal((3, *p.shape), np.float32) for p in (router, gate)]
    deltas = [Encoded.of(list(drawn[0])), *[Encoded.of(list(drawn[1]))] * 2]
    theta = [p.grid.to_tiles(rng.standard_normal(p.shape)) for p in (router, gate, up)]
    counts = np.array([[8, 0, 0, 0], [0, 4, 4, 0], [2, 2, 2, 2]]) / 8
    found = measure_routing(
        [router, gate, up], deltas, [None, counts, counts], WEIGHTS, theta
    )
    pairs = list(itertools.combinations(range(3), 2))
    weights = [WEIGHTS[i] * WEIGHTS[j] for i, j in pairs]
    apart = [np.linalg.norm(drawn[0][i] - drawn[0][j]) for i, j in pairs]
    same = [np.minimum(counts[i], counts[j]).sum() for i, j in pairs]
    total = np.array(WEIGHTS) @ counts / 8
    entropy = -(total * np.log(total)).sum() / np.log(4)
    assert found.measures == pytest.approx(
        {
            "router_distance": np.average(apart, weights=weights)
            / np.linalg.norm(theta[0]),
            "overlap": np.average(same, weights=weights),
            "entropy": entropy,
            "busiest": 4 * total.max(),
        },
        rel=1e-5,
    )
    loads = {"mlp/gate/0": tuple((4 * total).round(3))}
    assert found.loads == loads
    one = [Encoded.of(list(own[:1])) for own in drawn]
    alone = measure_routing([router, gate], one, [None, counts[:1]], [1], theta[:2])
    assert alone.measures == {"entropy": 0.0, "busiest": 4.0}
    dense = measure_routing([gate], deltas[1:2], [None], WEIGHTS, theta[1:2])
    assert dense == Routing({}, {})


def test_a_fixed_64th_of_the_tiles_is_looked_at() -> None:
    shape = (1024, 2048)
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    grid = TileGrid.of(shape)
    tiles = grid.split(x).reshape(-1, grid.elements)
    found = sample(grid.to_tiles(x))
    np.testing.assert_array_equal(found, tiles[::SAMPLED])
    assert found.nbytes == sample_bytes(TileGrid.of(shape)) == x.nbytes / SAMPLED


@pytest.mark.parametrize("shape", [(513, 257), (1001, 1003), (2049, 3, 5)])
def test_odd_extents_make_no_sample_larger(shape: tuple[int, ...]) -> None:
    """They leave one tile. Its elements are looked at in even distances."""
    (delta,), grid = drawn(4, [shape])[0][:1], TileGrid.of(shape)
    assert grid.tiles == 1
    found = sample(grid.to_tiles(delta))
    assert found.nbytes == sample_bytes(TileGrid.of(shape))
    assert 16384 <= found.size <= 2 * 16384
    assert np.std(found) == pytest.approx(np.std(delta), rel=0.05)
    np.testing.assert_array_equal(sampled(Encoded.of([delta]), 0), found)
    for name in CODECS.table:
        codec = get_codec(name)
        encoded = codec.encode(delta)
        whole = np.asarray(codec.decode(encoded, shape)).reshape(1, -1)
        theirs = sampled(Encoded(codec, shape, [encoded]), 0)
        np.testing.assert_array_equal(theirs, whole[:, :: -(-delta.size // found.size)])


@pytest.mark.parametrize(
    ("shape", "elements"),
    [
        ((201, 81), 201 * 81),
        ((255, 129), 255 * 129 / 2),
        ((2049, 1025), 2049 * 1025 / 64),
        ((2 * 1001, 1003), 1001 * 1003 / 32),
        ((128 * 1001, 1003), 2 * 1001 * 1003),
    ],
)
def test_few_large_tiles_are_looked_at_in_part(
    shape: tuple[int, int], elements: float
) -> None:
    """All elements of a tile are looked at up to its most; else that many, or 1/64."""
    assert sample_bytes(TileGrid.of(shape)) == 4 * math.ceil(elements)


@pytest.mark.parametrize("shape", [(512, 1024), (513, 1025)])
def test_sampled_deltas_agree_about_as_all_of_them(shape: tuple[int, int]) -> None:
    """Under a rule that has no sum of directions."""
    (deltas,), codec = drawn(2, [shape]), get_codec("int8")
    exact, *_ = measured([deltas], "rda")
    encoded = Encoded(codec, shape, [codec.encode(d) for d in deltas])
    merged = merge_piece(MERGE_RULES.find("mean"), encoded, WEIGHTS)
    found, _ = measure([encoded], [merged], WEIGHTS, [], [], [])
    assert found.pairwise_cosine == pytest.approx(exact.pairwise_cosine, abs=0.02)
    assert found.pairwise_cosine != exact.pairwise_cosine


@pytest.mark.parametrize("rule", ["rda", "mean", "trimmed_mean"])
def test_the_direction_of_each_delta_is_against_the_others(rule: str) -> None:
    pieces = drawn(3)
    pieces = [[deltas[0], deltas[1], -deltas[2]] for deltas in pieces]
    _, directions, *_ = measured(pieces, rule)
    islands = [
        np.concatenate([d.ravel() for d in own]) for own in zip(*pieces, strict=True)
    ]
    for number, found in enumerate(directions):
        others = sum(
            w * np.float64(d)
            for n, (w, d) in enumerate(zip(WEIGHTS, islands, strict=True))
            if n != number
        )
        assert found == pytest.approx(cosine(islands[number], others), abs=1e-5)
    assert directions[2] < 0, "it was turned"
