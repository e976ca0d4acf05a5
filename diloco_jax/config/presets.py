"""The outer optimizer of a run whose config leaves it open, by merges per fragment.

The measurements behind every number are in docs/design/outer_presets.md.
"""

from __future__ import annotations

import math

from diloco_jax.config.outer import OuterConfig

SHORT = OuterConfig(optimizer="sgd", learning_rate=1.0, momentum=0.0)
"""Preset for runs of few merges, in which momentum was no better, or worse."""

GENTLE = OuterConfig(optimizer="nesterov", learning_rate=0.4, momentum=0.6)
"""Preset whose momentum goes exactly as far as the islands went, 0.4 / (1 - 0.6)."""
GENTLE_FROM_MERGES = 80.0
GENTLE_FROM_MERGES_OF = {"muon": 160.0}
"""Merges from which momentum helps, for inner optimizers that need more of them."""

PUBLISHED_MOMENTUM = 0.9
PUBLISHED_RATES = ((1, 0.4), (4, 0.6), (math.inf, 0.8))
"""(most islands, outer learning rate) for the plain mean (arXiv 2503.09799)."""
PUBLISHED_FROM_MERGES = 200.0
PUBLISHED_FROM_STEPS = 24
"""Shortest cycle in steps: in a shorter one successive deltas are alike, and momentum
adds them up to several times the islands' own distance."""


def preset(
    *,
    merges_per_fragment: float,
    steps_per_cycle: int,
    islands: int,
    keeps_length: bool,
    inner: str,
    from_weights: bool = False,
) -> OuterConfig:
    """Choose the outer optimizer of a run.

    Args:
      from_weights: the run starts from trained weights. It then gets no momentum, which
        would carry it away from them.
      keeps_length: the merge rule's `keeps_length`.
      inner: name of the inner optimizer.
    """
    if from_weights or merges_per_fragment < GENTLE_FROM_MERGES_OF.get(
        inner, GENTLE_FROM_MERGES
    ):
        return SHORT
    if (
        keeps_length
        or merges_per_fragment < PUBLISHED_FROM_MERGES
        or steps_per_cycle < PUBLISHED_FROM_STEPS
    ):
        return GENTLE
    rate = next(rate for up_to, rate in PUBLISHED_RATES if islands <= up_to)
    return OuterConfig(
        optimizer="nesterov", learning_rate=rate, momentum=PUBLISHED_MOMENTUM
    )
