"""The fragments of a run's model."""

from __future__ import annotations

from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.core.fragments import FragmentPlan, Piece, plan_fragments
from diloco_jax.core.merge import RULES
from diloco_jax.core.merge.merging import may_cut
from diloco_jax.models.model import Model


def other_model(here: str, there: str) -> list[str]:
    """Describe the difference between two plans by their digests; return [] if there is
    none. A model comes from code, which a config names but does not hold."""
    if here == there:
        return []
    return [
        f"the model's parameters: the digest of their names, shapes and fragments is "
        f"{here} here, {there} there; the code of model.factory, or the version of "
        f"diloco_jax, is another one"
    ]


def build_plan(run: RunConfig, model: Model) -> FragmentPlan:
    """Build the plan from shapes and the merge rule alone; raise ConfigError if the run
    asks for more fragments than there can be."""
    sync = run.sync
    rule = RULES.find(sync.merge)

    def cuts(piece: Piece) -> bool:
        return may_cut(piece, rule)

    try:
        return plan_fragments(
            model.shapes(), model.axes, sync.fragments, sync.fragment_by, cuts
        )
    except ValueError as error:
        raise ConfigError(
            f"sync.fragments = {sync.fragments}, sync.fragment_by = "
            f"{sync.fragment_by!r}: {error}"
        ) from error
