"""Merges of one fragment, and comparing them bit by bit."""

import jax
import numpy as np

from diloco_jax.core.codecs import encode_uses, get_codec
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.core.fragment_merge import FragmentMerge, MergeResult
from diloco_jax.core.fragments import Piece
from diloco_jax.core.outer import OuterSettings

PIECES = (
    Piece(("a",), -1, (64, 96), False),
    Piece(("b",), -1, (33,), False),
    Piece(("c",), -1, (128, 40), True),
)
TOKENS = 1000
"""Of each delta."""


def merger(
    rule="rda",
    optimizer="nesterov",
    codec="int8",
    passes=None,
    *,
    pieces=PIECES,
    guard=1.1,
) -> FragmentMerge:
    return FragmentMerge(
        pieces=pieces,
        up=get_codec(codec),
        down=get_codec(codec),
        rule=MERGE_RULES.find(rule),
        settings=OuterSettings(
            optimizer=optimizer, learning_rate=0.5, momentum=0.9, norm_guard=guard
        ),
        passes=passes,
    )


def merged(
    merge: FragmentMerge, *, flush: bool = False, merges: int = 5, uses=lambda n, m: ()
) -> list[MergeResult]:
    """What some merges make of three deltas each; the guard cuts the later ones.

    flush: the last is one. uses: makes the counts of a delta, by the numbers of merge
    and island."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(p.shape, np.float32) for p in merge.pieces]
    state, found, last = merge.begin(values), [], ()
    for number in range(1, merges + 1):
        payloads = []
        for island in range(3):
            arrays = [
                merge.up.encode(rng.standard_normal(p.shape, np.float32) * number)
                for p in merge.pieces
            ]
            arrays += map(encode_uses, uses(number, island))
            payloads.append(merge.layout_up.pack(arrays))
        made = merge.merge(
            state,
            payloads,
            [merge.squares(payload) for payload in payloads],
            [1, 2, 3],
            share=0.5,
            final=flush and number == merges,
            last=last,
            tokens=[TOKENS] * 3,
        )
        state, last = made.state, made.sample
        found.append(made._replace(payload=bytes(made.payload)))
    return found


def same_bits(one, other) -> None:
    one, other = np.atleast_1d(one), np.atleast_1d(other)
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


def assert_same(one, other) -> None:
    leaves, structure = jax.tree.flatten(one)
    others, like = jax.tree.flatten(other)
    assert structure == like
    for ours, theirs in zip(leaves, others, strict=True):
        if isinstance(ours, np.ndarray | jax.Array):
            same_bits(ours, theirs)
        else:
            assert ours == theirs
