"""An island's compiled parts, made from its config: for runs, emulation and replay."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from diloco_jax.config import IslandConfig, RunConfig
from diloco_jax.core.fragments import FragmentPlan, from_pieces, plan_fragments
from diloco_jax.core.inner import make_inner
from diloco_jax.island.exchange import Exchange
from diloco_jax.island.mesh import make_mesh
from diloco_jax.island.replica import Replica
from diloco_jax.island.step import Trainer, TrainState
from diloco_jax.models import transformer
from diloco_jax.models.model import Model, Params


def build_trainer(run: RunConfig, island: IslandConfig) -> tuple[Model, Trainer]:
    """The run's model and inner optimizer on the island's mesh."""
    model = transformer.build(
        run.model,
        compute_dtype=island.compute_dtype,
        remat=island.remat,
        attention=island.attention,
    )
    inner = make_inner(
        run.inner.optimizer,
        axes=model.axes,
        beta1=run.inner.beta1,
        beta2=run.inner.beta2,
        weight_decay=run.inner.weight_decay,
        clip_norm=run.inner.clip_norm,
    )
    return model, Trainer(model, inner, island, make_mesh(island))


def build_plan(run: RunConfig, model: Model) -> FragmentPlan:
    """The run's fragments of the model."""
    return plan_fragments(model.shapes(), model.axes, run.sync.fragments)


def build_exchange(
    run: RunConfig, model: Model, trainer: Trainer
) -> tuple[Exchange, Params]:
    """Takes and adoptions of an island that has no anchors yet, and parameters of
    zeros that lie as the real ones will."""
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), model.shapes())
    params = trainer.place_params(zeros)
    return Exchange(build_plan(run, model), run.sync, params), params


def join(
    plan: FragmentPlan,
    trainer: Trainer,
    exchange: Exchange,
    anchors: Mapping[int, tuple[jax.Array, ...]],
) -> Replica:
    """A model copy that begins at these anchors (by fragment, then by piece), with
    fresh moments."""
    exchange.start(anchors)
    params = trainer.place_params(from_pieces(plan, exchange.anchors()))
    state = TrainState(params, trainer.init_inner(params))
    return Replica(trainer, exchange, state)
