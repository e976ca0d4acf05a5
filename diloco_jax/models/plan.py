"""The fragments of a run's model."""

from __future__ import annotations

from collections.abc import Callable

from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.core import merging
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.core.fragments import FragmentPlan, Piece, plan_fragments
from diloco_jax.core.outer import is_elementwise
from diloco_jax.models.model import Model


def other_model(here: str, there: str) -> list[str]:
    """Describe how two plans differ, given their digests; return [] if they are equal.

    Plans can differ under one config, since a config names the code of a model and does
    not hold it.
    """
    if here == there:
        return []
    return [
        f"the model's parameters: the digest of their names, shapes and fragments is "
        f"{here} here, {there} there; the code of model.factory, or the version of "
        f"diloco_jax, is another one"
    ]


def build_plan(run: RunConfig, model: Model) -> FragmentPlan:
    """Build the plan from shapes, merge rule and outer optimizer alone; raise
    ConfigError if the run asks for more fragments than there can be."""
    sync, may_cut = run.sync, _cutting(run)
    try:
        return plan_fragments(
            model.shapes(), model.axes, sync.fragments, sync.fragment_by, may_cut
        )
    except ValueError as error:
        raise ConfigError(
            f"sync.fragments = {sync.fragments}, sync.fragment_by = "
            f"{sync.fragment_by!r}: {error}"
        ) from error


def _cutting(run: RunConfig) -> Callable[[Piece], bool]:
    """Return which pieces may be cut: those whose bands the run's merges and outer
    steps treat as the whole."""
    rule, optimizer = MERGE_RULES.find(run.sync.merge), run.outer.optimizer
    # One that is still open becomes a preset; those go element by element.
    by_element = optimizer is None or is_elementwise(optimizer)
    return lambda piece: by_element and merging.may_cut(piece, rule)
