"""Results that are equal but for rounding, as checks of members compare them."""

from __future__ import annotations

import numpy as np

from diloco_jax.core.tiles import ArrayLike

ROUNDING = 1e-4
"""Relative difference of two results that are equal but for rounding."""


def equal_but_for_rounding(found: ArrayLike, wanted: ArrayLike) -> bool:
    """Tell whether two arrays of one shape are equal but for rounding.

    Each element may differ by `ROUNDING` times itself or the largest element.
    """
    most = float(np.abs(wanted).max())
    return bool(np.allclose(found, wanted, ROUNDING, ROUNDING * most))
