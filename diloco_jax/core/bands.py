"""Bands: the parts of a tensor that is larger than a fragment.

The tensor's longest axis is divided into equal stripes, and every band has the same
rows of each:

    rows of the axis, two stripes:   0 0 1 1 2 2 | 0 0 1 1 2 2   (band of each row)

So a mesh axis that cuts the tensor cuts every band alike, wherever it does so between
stripes: each device holds a part of every band. Bands depend on the tensor and the size
of a fragment alone, never on a mesh (docs/design/pieces.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from diloco_jax.core.tiles import ArrayLike

MOST_STRIPES = 256
ALIGNED = (8, 128)
"""Rows of an axis that a TPU keeps together: of the last axis 128, of others 8. Stripes
and bands end there where they can."""


@dataclasses.dataclass(frozen=True, order=True, kw_only=True)
class Bands:
    """The division of a tensor into bands."""

    axis: int
    """The axis that is cut, counted from the end: -1 is the last."""
    stripes: int
    rows: int
    """Rows of a stripe that a band has; the last band may have fewer."""

    @staticmethod
    def of(shape: tuple[int, ...], limit: float) -> Bands:
        """Return the division into bands of at most `limit` elements, if a row has no
        more. A band has a power of two of rows, so that its tiles fit many meshes."""
        axis = max(range(len(shape)), key=lambda a: (shape[a], -a)) - len(shape)
        extent = shape[axis]
        wanted = max(1.0, limit / (math.prod(shape) // extent))
        rows = 2 ** int(math.log2(wanted))
        aligned = ALIGNED[axis == -1]
        stripes = 1
        while (
            stripes < MOST_STRIPES
            and rows % (2 * stripes * aligned) == 0
            and extent % (2 * stripes * aligned) == 0
        ):
            stripes *= 2
        return Bands(axis=axis, stripes=stripes, rows=rows // stripes)

    def shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the shape of each band of a tensor."""
        own, at = list(shape), len(shape) + self.axis
        of_stripe = shape[at] // self.stripes
        for start in range(0, of_stripe, self.rows):
            own[at] = self.stripes * min(self.rows, of_stripe - start)
            yield tuple(own)

    def striped(self, x: Any) -> Any:
        """Split the axis of a tensor or a band: [..., rows of all stripes, ...] ->
        [..., stripes, rows of one, ...]."""
        at = x.ndim + self.axis
        return x.reshape(*x.shape[:at], self.stripes, -1, *x.shape[at + 1 :])

    def joined(self, x: Any) -> Any:
        """Join the axis again: the inverse of `striped`."""
        at = x.ndim + self.axis
        return x.reshape(*x.shape[: at - 1], -1, *x.shape[at + 1 :])

    def index(self, band: int) -> tuple[Any, ...]:
        """Return the index of a band in a striped tensor."""
        rows = slice(band * self.rows, (band + 1) * self.rows)
        return (..., rows, *(slice(None),) * (-self.axis - 1))

    def concatenate(self, bands: Sequence[ArrayLike]) -> ArrayLike:
        """Return the tensor of all its bands, in their order; numpy's of numpy's."""
        xp: Any = np if all(isinstance(x, np.ndarray) for x in bands) else jnp
        whole: ArrayLike = self.joined(
            xp.concatenate([self.striped(x) for x in bands], axis=self.axis)
        )
        return whole
