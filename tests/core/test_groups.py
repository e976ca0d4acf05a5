"""Groups of a piece: experts, of which no tile and no band has a part of two; and
weights by use of the rows of its first axis."""

import dataclasses

import jax
import jax.numpy as jnp
import merges
import numpy as np
import pytest
from merges import TOKENS, assert_same, merger

from diloco_jax import compilation
from diloco_jax.core.codecs import decode_uses, encode_uses, get_codec
from diloco_jax.core.families import MERGE_RULES, Whole
from diloco_jax.core.fragment_merge import FragmentState, MergeResult
from diloco_jax.core.fragments import (
    Bands,
    Piece,
    from_pieces,
    get_piece,
    plan_fragments,
)
from diloco_jax.core.merging import (
    MEAN,
    Encoded,
    MergedPiece,
    may_cut,
    merge_piece,
    row_shares,
    rule_for,
)
from diloco_jax.core.tiles import Passes, TileGrid

EXPERTS = 6


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """Return an array whose values are the number of the expert."""
    rows = np.arange(shape[0], dtype=np.float32)
    return np.broadcast_to(rows.reshape(-1, *(1,) * (len(shape) - 1)), shape)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [((8, 16, 8), (1, 16, 8)), ((6, 64, 96), (1, 32, 24)), ((5, 7), (1, 7))],
)
def test_no_tile_has_two_groups(shape: tuple[int, ...], tile: tuple[int, ...]) -> None:
    grid = TileGrid.of(shape, shape[0])
    assert (grid.tile, grid.shape) == (tile, shape)
    tiles = grid.to_tiles(numbered(shape))
    assert (tiles == tiles[:, :1]).all()
    np.testing.assert_array_equal(grid.from_tiles(tiles), numbered(shape))


def test_a_large_expert_takes_no_bits_of_the_scale_of_a_small_one() -> None:
    codec, shape = get_codec("int8"), (4, 16, 8)
    x = np.full(shape, 1e-3, np.float32)
    x[0] = 1e3
    apart = codec.decode(codec.encode(x, 4), shape, 4)
    np.testing.assert_allclose(apart, x, rtol=0.01)
    # A tile of all has blocks of two experts, and one scale would lose the small one.
    assert not np.asarray(codec.decode(codec.encode(x), shape))[1].any()


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_bands_have_whole_experts_or_the_same_part_of_each(
    layers: int, whole: bool
) -> None:
    shape = (layers, EXPERTS, 32, 16)
    plan = plan_fragments(
        {"up": shape},
        {"up": ("layers", "expert", "embed", "mlp")},
        layers * (2 if whole else 12),
        may_cut=lambda piece: True,
    )
    values = np.broadcast_to(numbered((EXPERTS, 32, 16)), shape)
    for piece in plan.pieces:
        found = get_piece({"up": values}, piece)
        assert piece.bands is not None
        assert piece.groups == piece.shape[0] == len(found)
        assert piece.expert
        assert (found == found[:, :1, :1]).all()
        assert (piece.groups < EXPERTS, piece.shape[1:] == (32, 16)) == (whole, whole)
    arrays = {piece.name: get_piece({"up": values}, piece) for piece in plan.pieces}
    np.testing.assert_array_equal(from_pieces(plan, arrays)["up"], values)


def test_a_mesh_of_experts_cuts_every_band_alike() -> None:
    bands = Bands.of((64, 32, 16), 8 * 32 * 16, 64)
    assert (bands.axis, bands.stripes) == (-3, 8)


@pytest.mark.parametrize("fragments", [1, 2, EXPERTS, 4 * EXPERTS])
def test_the_number_of_fragments_does_not_choose_the_rule_of_experts(
    fragments: int,
) -> None:
    """A band may have one expert alone, and is merged as those of many are."""
    rule = MERGE_RULES.find("rda")
    plan = plan_fragments(
        {"up": (EXPERTS, 64, 64)},
        {"up": ("expert", "embed", "mlp")},
        fragments,
        may_cut=lambda piece: may_cut(piece, rule),
    )
    assert {rule_for(piece, rule) for piece in plan.pieces} == {MEAN}
    assert (fragments == 2) <= ({p.shape[0] for p in plan.pieces} == {1})


def test_groups_are_a_part_of_the_plan() -> None:
    piece = Piece(("up",), -1, (EXPERTS, 32, 16), False, groups=EXPERTS, expert=True)
    (fragment,) = plan_fragments(
        {"up": piece.shape}, {"up": ("expert", "embed", "mlp")}, 1
    ).fragments
    assert fragment == (piece,)
    plain = plan_fragments({"up": piece.shape}, {"up": (None, "embed", "mlp")}, 1)
    assert plain.pieces == (dataclasses.replace(piece, groups=1, expert=False),)
    alike = dataclasses.replace(plain, fragments=(fragment,))
    assert plain.digest() != alike.digest()


# ---- weights by use ----------------------------------------------------------------

TABLE = Piece(("table",), -1, (96, 40), True, by_use=1)
OTHER = Piece(("other",), -1, (24, 16), False)
BIAS = Piece(("tower", "bias"), -1, (48,), False, by_use=0.25, as_one=True)
PIECES = (OTHER, TABLE, BIAS)
SEEN = ((0, 5, 7), (0, 0, 0), (0, 3, 0))
"""Use of the bias by island, in three merges."""
ISLANDS = 3
WEIGHTS = [1.0, 2.0, 3.0]


def counts_of(island: int, rows: int) -> np.ndarray:
    """Return counts of rows: some that one island used, and the first by none."""
    rng = np.random.default_rng(island)
    counts = rng.integers(0, 10, rows) * (rng.random(rows) < 0.5)
    counts[0] = 0
    return counts.astype(np.uint32)


def oracle(deltas: np.ndarray, weights: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the mean of f64[M, rows, ...] by weights f64[M] times counts f64[M,
    rows], row by row in numpy; 0 where all are 0."""
    merged = np.zeros(deltas.shape[1:])
    for row in range(deltas.shape[1]):
        own = weights * counts[:, row]
        if own.sum() > 0:
            merged[row] = np.tensordot(own / own.sum(), deltas[:, row], 1)
    return merged


@pytest.mark.parametrize(
    ("count", "read"),
    [
        (0, 0),
        (1, 1),
        (2047, 2047),
        (2048, 2048),
        (2049, 2048),
        (4095, 4094),
        (123_456_789, 123_404_288),
        (2**32 - 1, 2047 << 21),
    ],
)
def test_counts_lie_on_a_log_scale_and_are_never_read_as_more(
    count: int, read: int
) -> None:
    octets = np.asarray(encode_uses(np.array([count, 7], np.uint32)))
    assert octets.shape == (1, 4)
    assert decode_uses(octets).tolist() == [read, 7]


def test_codes_rise_with_counts_and_all_can_be_read() -> None:
    read = decode_uses(np.arange(2**16, dtype="<u2").view(np.uint8))
    assert np.isfinite(read).all()
    assert (np.diff(read) > 0).all()
    assert np.diff(read).max() <= read.max() / 1024


@pytest.mark.parametrize("piece", [TABLE, dataclasses.replace(TABLE, groups=96)])
@pytest.mark.parametrize("rule", ["mean", "trimmed_mean"])
def test_rows_are_weighed_by_use(rule: str, piece: Piece) -> None:
    rng = np.random.default_rng(0)
    deltas = rng.standard_normal((2, *piece.shape), np.float32)  # Two are not trimmed.
    counts = np.stack([counts_of(m, piece.shape[0]) for m in range(2)])
    codec = get_codec("f32")
    encoded = Encoded(
        codec,
        piece.shape,
        [codec.encode(d, piece.groups) for d in deltas],
        groups=piece.groups,
    )
    made = merge_piece(
        MERGE_RULES.find(rule), encoded, WEIGHTS[:2], 0.5, uses=counts / TOKENS
    )
    wanted = 0.5 * oracle(deltas.astype(float), np.array(WEIGHTS[:2]), counts)
    np.testing.assert_allclose(made.delta, wanted, rtol=1e-5, atol=1e-6)
    assert made.unused is not None
    np.testing.assert_array_equal(made.unused, ~counts.any(axis=0))
    assert not made.delta[made.unused].any()


def test_a_rule_factors_each_delta_and_use_shares_out_each_row() -> None:
    """RDA takes unit deltas, and its length is that of the whole deltas."""
    rng = np.random.default_rng(0)
    deltas = rng.standard_normal((ISLANDS, *TABLE.shape), np.float32).astype(float)
    deltas *= np.array([1.0, 5.0, 0.2]).reshape(-1, 1, 1)
    counts = np.stack([counts_of(m, 96) for m in range(ISLANDS)])
    shares, lengths = np.array(WEIGHTS) / 6, np.sqrt(np.square(deltas).sum((1, 2)))
    directions = oracle(deltas / lengths.reshape(-1, 1, 1), shares, counts)
    wanted = directions / np.linalg.norm(directions) * (shares @ lengths)
    made = merge_piece(
        MERGE_RULES.find("rda"),
        Encoded.of(list(deltas.astype(np.float32))),
        WEIGHTS,
        uses=counts / TOKENS,
    )
    np.testing.assert_allclose(made.delta, wanted, rtol=1e-4, atol=1e-6)


def test_what_did_not_use_a_row_does_not_enter_it_even_where_a_rule_ranks_it() -> None:
    """The one of three that used row 1 is left out at an end; the others moved it."""
    deltas = np.ones((3, 2, 4), np.float32) * np.array([9, 1, 1])[:, None, None]
    uses = np.array([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    made = merge_piece(
        MERGE_RULES.find("trimmed_mean"),
        Encoded.of(list(deltas.astype(np.float32))),
        [1.0, 1.0, 1.0],
        uses=uses,
    )
    np.testing.assert_array_equal(made.delta, [[1.0] * 4, [0.0] * 4])


@pytest.mark.parametrize("rule", ["mean", "rda", "clipped_mean", "trimmed_mean"])
def test_who_did_not_use_a_piece_is_not_in_its_merge(rule: str) -> None:
    rng = np.random.default_rng(0)
    deltas = list(rng.standard_normal((4, *BIAS.shape), np.float32))

    def of(who: list[int], weights: list[float], **uses) -> MergedPiece:
        own = Encoded.of([deltas[n] for n in who])
        return merge_piece(MERGE_RULES.find(rule), own, weights, 0.5, **uses)

    uses = np.array([[0.0], [0.2], [0.1], [0.1]])
    made = of([0, 1, 2, 3], [1.0, 1.0, 2.0, 3.0], uses=uses)
    assert made.unused is None
    alone = of([1, 2, 3], [2.0, 2.0, 3.0])
    np.testing.assert_allclose(made.delta, alone.delta, rtol=1e-5)
    one = of([0, 1, 2, 3], [1.0] * 4, uses=np.array([[0], [0], [0.3], [0]]))
    np.testing.assert_array_equal(one.delta, of([2], [1.0]).delta)
    none = of([0, 1, 2, 3], [1.0] * 4, uses=np.zeros((4, 1)))
    assert none.unused is not None
    assert none.unused.all()
    assert not none.delta.any()


def test_a_cap_holds_in_each_row_that_enough_islands_used() -> None:
    uses = np.array([[0.1, 0.1], [0.01, 0.0], [0.01, 0.0]])
    found = row_shares([1 / 3] * 3, uses, 0.5)
    np.testing.assert_allclose(found, [[0.5, 1.0], [0.25, 0.0], [0.25, 0.0]])


def test_a_rule_that_sees_whole_deltas_refuses_uses() -> None:
    class Own:
        needs = "whole"

    deltas = Encoded.of([np.ones((2, 4), np.float32)])
    with pytest.raises(ValueError, match="Own sees whole deltas"):
        merge_piece(Own(), deltas, [1.0], uses=np.ones((1, 2)))  # type: ignore[arg-type]


def _leaves(tree: object) -> list[np.ndarray]:
    return [x for x in jax.tree.leaves(tree) if x.ndim]


def counts_in(number: int, island: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts of table and bias in a delta."""
    seen = np.array([SEEN[number - 1][island]], np.uint32)
    return counts_of(10 * number + island, TABLE.shape[0]), seen


def merged(
    optimizer: str, codec: str, passes: Passes | None = None, guard: float = 1.1
) -> list[tuple[MergeResult, np.ndarray]]:
    """Return three merges, the last one a flush, and which rows nobody used."""
    merge = merger("rda", optimizer, codec, passes, pieces=PIECES, guard=guard)
    made = merges.merged(merge, flush=True, merges=len(SEEN), uses=counts_in)
    used = [
        np.any([counts_in(number, island)[0] for island in range(ISLANDS)], axis=0)
        for number in range(1, len(SEEN) + 1)
    ]
    return [(result, ~rows) for result, rows in zip(made, used, strict=True)]


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam", "lamb"])
def test_a_row_that_nobody_used_keeps_its_bits(optimizer: str) -> None:
    """lamb sees whole fragments; its moments know no rows."""
    before = last = None
    for number, (made, unused) in enumerate(merged(optimizer, "int8", guard=0.0)):
        theta = TABLE.grid.from_tiles(made.state.theta[1])
        bias, rests = made.state.theta[2], number == 1
        assert unused[0]
        assert not unused.all()
        if before is not None:
            np.testing.assert_array_equal(theta[unused], before[unused])
            assert (theta[~unused] != before[~unused]).any(axis=1).all()
            assert (bias != last).any() != rests
        before, last = theta, bias


def momenta(state: FragmentState) -> list[np.ndarray]:
    pairs = zip(PIECES, state.outer, strict=True)
    return [p.grid.from_tiles(_leaves(own["optimizer"])[0]) for p, own in pairs]


def test_the_state_of_a_rule_rests_where_nobody_used_the_piece() -> None:
    class Steps(Whole):
        def start(self, shape):
            return jnp.zeros(())

        def recovered(self, state, change):
            return state + 1

        def merge(self, deltas, weights, share, state):
            return share * jnp.tensordot(weights, deltas, 1), state + 1

    plain = merger(codec="f32", pieces=PIECES)
    merge = dataclasses.replace(plain, pieces=(OTHER, BIAS), rule=Steps())
    state = merge.begin([np.ones(p.shape, np.float32) for p in merge.pieces])
    own = [merge.up.encode(np.ones(p.shape, np.float32)) for p in merge.pieces]
    payload = merge.layout_up.pack([*own, encode_uses(np.zeros(1, np.uint32))])
    made = merge.merge(
        state,
        [payload],
        [merge.squares(payload)],
        [1.0],
        share=1.0,
        final=False,
        last=(),
        tokens=[TOKENS],
    )
    assert [float(own) for own in made.state.rules] == [1, 0]
    again = merge.replay(state, made.payload, final=False, unused=made.unused)
    assert_same(again.rules, made.state.rules)


@pytest.mark.parametrize("guard", [0.0, 2.0])
@pytest.mark.parametrize("route", ["xla", "native"])
def test_momentum_of_what_nobody_used_rests_in_a_publish_applied_again(
    route, guard
) -> None:
    """Nor is it a part of the length by which the guard goes."""
    (one, _), (two, unused), _ = merged("nesterov", "f32", guard=guard)
    passes = compilation.passes_of("native") if route == "native" else None
    merge = merger(codec="f32", passes=passes, pieces=PIECES, guard=guard)
    assert sorted(two.unused) == [1, 2]
    again = merge.replay(one.state, two.payload, final=False, unused=two.unused)
    for exact, found in zip(two.state.outer, again.outer, strict=True):
        if guard:
            norms = exact["guard"].mean_norm, found["guard"].mean_norm
            assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    for piece, rows in ((1, unused), (2, np.ones(48, bool))):
        before, found, exact = (
            momenta(state)[piece] for state in (one.state, again, two.state)
        )
        assert before[rows].any()
        for after in (exact, found):
            np.testing.assert_array_equal(after[rows], before[rows])
        np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-4)


def test_what_a_delta_says_of_use_is_summed_and_digested() -> None:
    merge = merger(pieces=(OTHER, TABLE))
    arrays = [merge.up.encode(np.zeros(p.shape, np.float32)) for p in merge.pieces]
    counts = counts_of(0, 96)
    payload = merge.layout_up.pack([*arrays, encode_uses(counts)])
    assert len(payload) == merge.layout_down.total_bytes + 2 * 96
    found = merge.uses(payload)
    assert found.most == counts.sum()
    seen = dataclasses.replace(merge, pieces=(BIAS,))
    own = merge.up.encode(np.zeros(BIAS.shape, np.float32))
    told = seen.layout_up.pack([own, encode_uses(np.array([2047], np.uint32))])
    assert seen.uses(told).most == 2047 / BIAS.by_use
    assert found.digest.startswith("xxh3-128:")
    lies = merge.layout_up.pack([*arrays, np.full((1, 2 * 96), 0xFF, np.uint8)])
    assert merge.uses(lies).most == 2**62, "a message holds no more"
    payload[-1] ^= 1
    assert merge.uses(payload).digest != found.digest
    with pytest.raises(ValueError, match=r"payload of \d+ bytes, the layout has"):
        merge.layout_up.unpack(payload[: -2 * 96])
    plain = dataclasses.replace(merge, pieces=(OTHER,))
    assert plain.uses(plain.layout_up.pack(arrays[:1])) == (0, "")


@pytest.mark.optimized
@pytest.mark.parametrize("codec", ["f32", "int8", "int4"])
@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])
def test_both_routes_merge_by_use_with_the_same_bits(
    optimizer: str, codec: str
) -> None:
    passes = compilation.passes_of("native")
    for (one, _), (other, _) in zip(
        merged(optimizer, codec), merged(optimizer, codec, passes), strict=True
    ):
        assert_same(one.state, other.state)
        assert bytes(one.payload) == bytes(other.payload)
        assert one.norm == other.norm


@pytest.mark.parametrize("fragments", [1, 4])
def test_bands_of_a_table_have_the_counts_of_their_rows(fragments: int) -> None:
    shape = (512, 8)
    plan = plan_fragments(
        {"table": shape},
        {"table": ("vocab", "embed")},
        fragments,
        may_cut=lambda piece: True,
        by_use={"table": 1},
    )
    values = np.broadcast_to(np.arange(512.0)[:, None], shape)
    counts = np.arange(512)
    for piece in plan.pieces:
        assert piece.by_use
        rows = get_piece({"table": values}, piece)[:, 0]
        np.testing.assert_array_equal(piece.uses_of(counts), rows)
