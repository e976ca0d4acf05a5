"""Merges of one fragment, and comparing them bit by bit."""

import jax
import numpy as np

from diloco_jax.core.codecs import get_codec
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.core.fragment_merge import FragmentMerge, MergeResult
from diloco_jax.core.fragments import Piece
from diloco_jax.core.outer import OuterSettings

PIECES = (
    Piece(("a",), -1, (64, 96), False),
    Piece(("b",), -1, (33,), False),
    Piece(("c",), -1, (128, 40), True),
)


def merger(rule="rda", optimizer="nesterov", codec="int8", passes=None):
    return FragmentMerge(
        pieces=PIECES,
        up=get_codec(codec),
        down=get_codec(codec),
        rule=MERGE_RULES.find(rule),
        settings=OuterSettings(
            optimizer=optimizer, learning_rate=0.5, momentum=0.9, norm_guard=1.1
        ),
        passes=passes,
    )


def merged(merge: FragmentMerge, *, flush: bool = False) -> list[MergeResult]:
    """What five merges make; the guard cuts the later ones. flush: the last is one."""
    rng = np.random.default_rng(0)
    state = merge.begin([rng.standard_normal(p.shape, np.float32) for p in PIECES])
    found, last = [], ()
    for number in range(1, 6):
        payloads = []
        for _ in range(3):
            arrays = [
                merge.up.encode(rng.standard_normal(p.shape, np.float32) * number)
                for p in PIECES
            ]
            payloads.append(merge.layout_up.pack(arrays))
        made = merge.merge(
            state,
            payloads,
            [merge.squares(payload) for payload in payloads],
            [1, 2, 3],
            share=0.5,
            final=flush and number == 5,
            last=last,
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
