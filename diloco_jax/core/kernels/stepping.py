"""The outer step of one piece, ready for the merge route "native"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from diloco_jax.core.kernels.library import Step, Values
from diloco_jax.core.outer import optimizer as outer
from diloco_jax.core.outer.optimizer import OuterSettings


class PieceStep(NamedTuple):
    """An outer step of one piece."""

    step: Step
    trace: Values | None
    """The momentum before the step, if there is any."""
    new_trace: Values | None
    """The place of the new momentum."""
    after: Any
    """The state of the outer optimizer after the step; it holds `new_trace`."""


def piece_step(
    settings: OuterSettings,
    state: Any,
    factor: float,
    norm: np.float32,
    empty: Callable[[tuple[int, ...], npt.DTypeLike], npt.NDArray[Any]],
) -> PieceStep | None:
    """Return the outer step of a piece in C; None if the optimizer has none.

    Args:
      settings: the outer optimizer, which goes element by element.
      state: its state for the piece, in the order of the tiles.
      factor: multiplies the sum of the deltas.
      norm: length of the whole fragment's merged delta.
      empty: makes the array of the new momentum.
    """
    kind = outer.native_step(settings.optimizer)
    if kind is None:
        return None
    scalars = outer.step_scalars(settings, state, norm)
    # The sum of momentum and a delta that the guard scaled is rounded otherwise.
    guarded = kind == "nesterov" and settings.norm_guard > 0
    step = Step(
        kind="guarded_nesterov" if guarded else kind,
        factor=factor,
        guard=scalars.guard,
        momentum=settings.momentum,
        rate=scalars.rate,
    )
    kept, structure = jax.tree.flatten(state["optimizer"])
    if not kept:
        return PieceStep(step, None, None, scalars.after)
    (trace,) = kept
    new_trace = empty(trace.shape, np.float32)
    scalars.after["optimizer"] = jax.tree.unflatten(structure, [new_trace])
    return PieceStep(step, trace, new_trace, scalars.after)
