"""The outer optimizer of a run that names none, by what was measured."""

from __future__ import annotations

import math
from typing import NamedTuple


class OuterPreset(NamedTuple):
    """What an `OuterConfig` that leaves them open gets."""

    optimizer: str
    learning_rate: float
    momentum: float


SHORT = OuterPreset("sgd", 1.0, 0.0)
"""Runs of few merges, in which momentum was no better, or worse."""

GENTLE = OuterPreset("nesterov", 0.4, 0.6)
GENTLE_FROM_MERGES = 80.0
"""Momentum that goes as far as the islands went, 0.4 / (1 - 0.6), and no further. Over
none, 8 islands, RDA, AdamW inside (docs/results/quality.md), by merges per fragment:
81: -0.7, -2.8 and -1.7 % of the loss; 143: -2.3, -3.4, -1.4 and -3.1 %; 163: -3.2, -1.0
and -2.6 %; 326: -2.6, -1.4 and -0.8 %; with a quarter of the tokens 10 to 122: +1.6 to
-0.5 %. 0.4 / 0.9, published for one island, was behind it in three pairs of three at
326 merges (1.5, 1.6 and 0.1 %)."""
GENTLE_FROM_MERGES_OF = {"muon": 160.0}
"""With Muon inside momentum was worse in nine pairs of nine with 41 to 151 merges (+0.3
to +2.8 %), and better in three of three with 163 and more tokens (0.9, 2.1, 1.4 %)."""

PUBLISHED_MOMENTUM = 0.9
PUBLISHED_RATES = ((1, 0.4), (4, 0.6), (math.inf, 0.8))
"""Up to so many islands, of the plain mean (arXiv 2503.09799, H = 30). A mean of M
deltas, which are nearly orthogonal, is shorter than one of them; RDA is as long, and at
H = 24 and 326 merges 0.8 / 0.9 is 5.7 % worse than no momentum with it."""
PUBLISHED_FROM_MERGES = 200.0
PUBLISHED_FROM_STEPS = 24
"""Of a cycle. The shorter it is, the more alike successive deltas should be, which
momentum adds up to several times the way that the islands went: 0.7 / 0.9 is 9 % worse
than none at H = 12 and 163 merges, 72 % at H = 4 and 490."""


def preset(
    *,
    merges_per_fragment: float,
    steps_per_cycle: int,
    islands: int,
    keeps_length: bool,
    inner: str,
) -> OuterPreset:
    """The outer optimizer for a run like that.

    Args:
      keeps_length: what its merge rule says of itself.
      inner: the name of the inner optimizer.
    """
    if merges_per_fragment < GENTLE_FROM_MERGES_OF.get(inner, GENTLE_FROM_MERGES):
        return SHORT
    if (
        keeps_length
        or merges_per_fragment < PUBLISHED_FROM_MERGES
        or steps_per_cycle < PUBLISHED_FROM_STEPS
    ):
        return GENTLE
    rate = next(rate for up_to, rate in PUBLISHED_RATES if islands <= up_to)
    return OuterPreset("nesterov", rate, PUBLISHED_MOMENTUM)
