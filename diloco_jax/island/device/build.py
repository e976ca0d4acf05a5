"""An island's compiled parts, made from its config: for runs, emulation and replay."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax

from diloco_jax.before_jax import libtpu_flags_in_force
from diloco_jax.config import ConfigError, IslandConfig, RunConfig
from diloco_jax.core.fragments import FragmentPlan
from diloco_jax.island.device.exchange import (
    ByPiece,
    Exchange,
    Replica,
    Restored,
    WatchedModel,
)
from diloco_jax.island.device.mesh import layout, make_mesh, place
from diloco_jax.island.device.step import Trainer, TrainState, UseCounts, use_shapes
from diloco_jax.models.build import build, build_inner, build_plan
from diloco_jax.models.model import Model, Params

Tree = TypeVar("Tree")
Left = Callable[[int], object]
"""Is told how many programs are left to compile."""

PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
"""Statuses of a failed compilation that another attempt may cure, as where a device or
the service of a compiler was away. They begin the error's text."""


class NotCompiledError(Exception):
    """The programs did not compile this time; another attempt may."""


def build_trainer(
    run: RunConfig, island: IslandConfig, devices: Sequence[jax.Device] | None = None
) -> tuple[Model, Trainer]:
    """Build the run's model and inner optimizer on the island's mesh.

    devices: those of the mesh. To compile, devices of a topology suffice that this
    machine does not have.
    """
    mesh = make_mesh(island, devices)
    model = build(run, island, layout(mesh))
    inner = build_inner(run, model)
    return model, Trainer(
        model,
        inner,
        island,
        mesh,
        run.data.arrays,
        run.model.frozen_digest,
        len(run.data.sources),
    )


def build_exchange(
    run: RunConfig, model: Model, trainer: Trainer
) -> tuple[Exchange, Params]:
    """Build takes and adoptions for an island that has no anchors yet, and parameters
    of zeros that lie as the real ones will."""
    plan, params = build_plan(run, model), trainer.zeros()
    uses = None
    if paths := {"/".join(piece.path) for piece in plan.pieces if piece.by_use}:
        counted = {path: use for path, use in model.uses.items() if path in paths}
        shapes = use_shapes(counted, model.axes, params)
        uses = UseCounts(plan, counted, shapes, trainer.mesh)
    return Exchange(plan, run.sync, params, trainer.anchor_memory, uses), params


def compile_ahead(
    trainer: Trainer,
    exchange: Exchange,
    sequence_length: int,
    watched: WatchedModel | None = None,
    left: Left = lambda _: None,
) -> None:
    """Compile everything that an island executes, and execute nothing.

    watched: copies of the merged model, if the island evaluates that. left, and what it
    raises: as for `compile_programs`.
    """
    programs = trainer.lower_all(sequence_length)
    if watched is not None:
        programs.append(trainer.lower_eval(watched.params, sequence_length))
        programs += watched.lower_all()
    compile_programs([*programs, *exchange.lower_all()], left)


def compile_programs(
    programs: Sequence[jax.stages.Lowered], left: Left = lambda _: None
) -> None:
    """Compile programs, which stay compiled for their first execution, or read them
    from the cache.

    left: called with the number of those that are not compiled yet, before each.

    On TPUs raises NotCompiledError for a status that may pass, and ConfigError for
    whatever else does not compile: another attempt would not, either. Elsewhere what
    fails may be the machine's.
    """
    try:
        for done, program in enumerate(programs):
            left(len(programs) - done)
            program.compile()
    except jax.errors.JaxRuntimeError as error:
        if jax.default_backend() != "tpu":
            raise
        if str(error).startswith(PASSING):
            raise NotCompiledError(
                f"the island's programs did not compile this time, and may the next: "
                f"{error}"
            ) from error
        raise ConfigError(
            f"the compiler refuses the island's programs for "
            f"{jax.devices()[0].device_kind}, with "
            f"{libtpu_flags_in_force(os.environ)}; flags that you set there win over "
            f"the ones of diloco_jax/before_jax.py, and `diloco plan` compiles "
            f"without a TPU; it said: {error}"
        ) from error


def join(
    plan: FragmentPlan,
    trainer: Trainer,
    exchange: Exchange,
    anchors: dict[int, ByPiece],
    restored: Restored | None = None,
) -> Replica:
    """Make a model copy that begins at these anchors, by fragment, with the moments and
    residuals of a checkpoint, or fresh ones. `anchors` is emptied."""
    exchange.start(anchors, restored.residuals if restored else None)
    params = at_anchors(plan, exchange, trainer.zeros())
    moments = restored.moments if restored else trainer.init_inner(params)
    return Replica(trainer, exchange, TrainState(params, moments))


def placed(
    kept: Restored,
    trainer: Trainer,
    exchange: Exchange,
    put: Callable[[int, bytes], ByPiece],
) -> Restored:
    """Place what is kept on the island's devices, for `join`: moments by leaf, and
    residuals that `put` places as it does an anchor."""
    like, structure = jax.tree.flatten(trainer.abstract_state().opt_state)
    leaves = [
        place(value, leaf.sharding)
        for leaf, value in zip(like, kept.moments, strict=True)
    ]
    residuals = {
        fragment: exchange.gather(fragment, put(fragment, residual))
        for fragment, residual in sorted(kept.residuals.items())
    }
    moments = jax.tree.unflatten(structure, leaves)
    return kept._replace(moments=moments, residuals=residuals)


def at_anchors(plan: FragmentPlan, exchange: Exchange, params: Tree) -> Tree:
    """Return parameters equal to the anchors; `params`, which lie alike, are
    donated."""
    for fragment in range(len(plan.fragments)):
        params = exchange.at_anchor(fragment, params)
    return params
