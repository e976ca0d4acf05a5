"""Weightings: the weight of a delta in a merge, by its tokens and inner steps; and a
cap on one island's share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from diloco_jax.core.members import Family


class Weighting(Protocol):
    """A member of the family: a function."""

    def __call__(self, tokens: int, steps: int) -> float:
        """Return the weight of a delta with that many tokens and steps, both at least
        1. It must be finite and above 0; only ratios of weights matter."""


WEIGHTINGS: Family[Weighting] = Family(
    kind="weighting",
    table={
        "tokens": "diloco_jax.core.weighting:tokens",
        "tokens_times_rate": "diloco_jax.core.weighting:tokens_times_rate",
        "uniform": "diloco_jax.core.weighting:uniform",
    },
    checker="diloco_jax.core.weighting:check",
)


def weight(weighting: Weighting, tokens: int, steps: int) -> float:
    """Return the weight of a delta of that many tokens and inner steps; 0 if empty."""
    return weighting(tokens, steps) if steps > 0 and tokens > 0 else 0.0


def tokens(tokens: int, steps: int) -> float:
    """Return the delta's tokens."""
    return float(tokens)


def tokens_times_rate(tokens: int, steps: int) -> float:
    """Return tokens * (tokens / steps), quantity times quality, as in Decoupled DiLoCo
    (arXiv 2604.21428)."""
    return tokens * (tokens / steps)


def uniform(tokens: int, steps: int) -> float:
    """Return the same weight for every delta."""
    return 1.0


def capped(weights: Sequence[float], most: float) -> list[float]:
    """Return the weights with none above the share `most` of their sum; what is above
    it goes to the others in proportion to theirs. All are the same if there are too
    few.

    weights: finite and at least 0, not all 0. most: above 0 and at most 1.
    """
    total = math.fsum(weights)
    held = [w > most * total for w in weights]
    while any(held) and sum(held) < len(weights):
        rest = math.fsum(w for w, own in zip(weights, held, strict=True) if not own)
        free = 1 - most * sum(held)
        if rest <= 0 or free <= 0:
            break
        limit = most * rest / free
        again = [own or w > limit for w, own in zip(weights, held, strict=True)]
        if again == held:
            return [limit if own else w for w, own in zip(weights, held, strict=True)]
        held = again
    # With too few others nobody can be held to that share.
    return [1.0 if w > 0 else 0.0 for w in weights] if any(held) else list(weights)


def check(weighting: Weighting) -> None:
    """Try a weighting from outside the package; raise an error if it is unfit."""
    for tokens, steps in ((1, 1), (600, 3), (10**12, 10**6)):
        found = weighting(tokens, steps)
        if not isinstance(found, int | float) or not 0 < found < math.inf:
            raise ValueError(
                f"it gives {found!r} to a delta of {tokens} tokens in {steps} steps; a "
                f"weight is a finite number above 0"
            )
