"""The model of a run, its inner optimizer and its fragments.

The model is the bundled transformer, or that of `model.factory`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.config import ConfigError, IslandConfig, RunConfig
from diloco_jax.core import merging
from diloco_jax.core.families import MERGE_RULES
from diloco_jax.core.fragments import FragmentPlan, Piece, plan_fragments
from diloco_jax.core.inner import left_to_adam, make_inner
from diloco_jax.core.members import load, said
from diloco_jax.core.outer import is_elementwise
from diloco_jax.data.pictures import require_pictures
from diloco_jax.data.source import WEIGHTS
from diloco_jax.models import transformer
from diloco_jax.models.model import ROWS, Layout, Model, abstract_batch


def build_inner(run: RunConfig, model: Model) -> optax.GradientTransformation:
    """Return the optimizer at learning rate 1; raise ConfigError if optax has none of
    that name and arguments."""
    inner = run.inner
    try:
        return make_inner(
            inner.optimizer,
            axes=model.axes,
            arguments=inner.arguments,
            beta1=inner.beta1,
            beta2=inner.beta2,
            moment_dtype=inner.moment_dtype,
            weight_decay=inner.weight_decay,
            clip_norm=inner.clip_norm,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def inner_note(run: RunConfig, model: Model | None = None) -> str:
    """Say which arrays Muon leaves to Adam; "" of any other optimizer. model: that of
    the run, if it is built. Raises ConfigError: see `build`."""
    if run.inner.optimizer != "muon":
        return ""
    named = left_to_adam((model or build(run)).axes)
    return (
        f"inner.optimizer = 'muon' leaves to Adam: "
        f"{', '.join(['all vectors', *named])} (docs/models.md, An optimizer)"
    )


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
    sync, optimizer = run.sync, run.outer.optimizer
    rule = MERGE_RULES.find(sync.merge)
    # One that is still open becomes a preset; those go element by element.
    by_element = optimizer is None or is_elementwise(optimizer)

    def may_cut(piece: Piece) -> bool:
        """Tell if merges and outer steps treat the bands of a piece as the whole."""
        return by_element and merging.may_cut(piece, rule)

    for path, use in model.uses.items():
        if not 0 < use.per_token < math.inf:
            raise ConfigError(
                f"the model says that a token uses {use.per_token} rows of {path} at "
                f"most; give per_token a finite number above 0"
            )
    by_use = {
        path: use.per_token
        for path, use in model.uses.items()
        if sync.weights_by_use == "rows"
        or (use.as_one and sync.weights_by_use == "parts")
    }
    try:
        plan = plan_fragments(
            model.shapes(),
            model.axes,
            sync.fragments,
            sync.fragment_by,
            may_cut,
            by_use,
            [path for path in by_use if model.uses[path].as_one],
        )
    except ValueError as error:
        raise ConfigError(
            f"sync.fragments = {sync.fragments}, sync.fragment_by = "
            f"{sync.fragment_by!r}: {error}"
        ) from error
    known = {"/".join(piece.path) for piece in plan.pieces if piece.shape}
    if unknown := sorted({*model.uses} - known):
        raise ConfigError(
            f"the model counts the use of {', '.join(unknown)}, and no tensor with "
            f"rows has that name: there are {', '.join(sorted(known))}"
        )
    for piece in plan.pieces:
        try:
            by_row = piece.by_use > 0 and not piece.as_one
            merging.require_rows(merging.rule_for(piece, rule), by_row)
        except ValueError as error:
            raise ConfigError(f"sync.merge = {sync.merge!r}: {error}") from error
    return plan


Factory = Callable[[RunConfig, IslandConfig, Layout], Model]
"""Type of the function that `model.factory` names."""
ADAPTED = "diloco_jax.weights.adapted:factory"
"""The factory of models of which a part stays as it is: it reads these weights, of
which nothing here knows."""


def build(
    run: RunConfig, island: IslandConfig | None = None, layout: Layout | None = None
) -> Model:
    """Return the run's model.

    Args:
      run: settings that all islands share.
      island: settings of this island; None = the defaults.
      layout: the mesh that it runs on; None = the default device.

    Raises:
      ConfigError: sizes that do not fit together; a factory that is not there, or that
        makes no model; pictures of the data that the model does not take.
    """
    island, layout = island or IslandConfig(), layout or Layout.of_one_device()
    if run.model.factory:
        return _own(run, island, layout)
    partly = run.model.lora_rank or run.model.train
    model: Model = (load(ADAPTED) if partly else bundled)(run, island, layout)
    require_pictures(model.pictures, model.batch, run.data)
    return model


def bundled(run: RunConfig, island: IslandConfig, layout: Layout) -> Model:
    """Return the bundled transformer; see `build`."""
    return transformer.build(
        run.model,
        compute_dtype=island.compute_dtype,
        remat=island.remat,
        attention=island.attention,
        loss_chunk=island.loss_chunk,
        layout=layout,
        pictures=max(run.data.pictures, 1),
        length=run.sequence_length,
    )


def _own(run: RunConfig, island: IslandConfig, layout: Layout) -> Model:
    where = f"model.factory = {run.model.factory!r}"
    try:
        factory: Factory = load(run.model.factory)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not callable(factory):
        raise ConfigError(f"{where} is {type(factory).__name__}; it must be a function")
    try:
        model = factory(run, island, layout)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{where} failed: {said(error)}") from error
    if not isinstance(model, Model):
        raise ConfigError(
            f"{where} returned {type(model).__name__}; it must return a "
            f"diloco_jax.models.model.Model"
        )
    try:
        _check(model, run, island, layout)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{where}: its model fails: {said(error)}") from error
    return model


def _check(model: Model, run: RunConfig, island: IslandConfig, layout: Layout) -> None:
    """Raise ConfigError unless the model is as `Model` says; compute nothing."""
    require_pictures(model.pictures, model.batch, run.data)
    shapes = model.shapes()
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        keys = [getattr(key, "key", None) for key in path]
        if not keys or not all(isinstance(key, str) for key in keys):
            raise ConfigError(
                f"init makes a leaf at {jax.tree_util.keystr(path) or 'the top'}; "
                f"parameters are nested dicts with names as keys: of flax, "
                f"nnx.to_pure_dict(state), and a dict in place of each list"
            )
        if leaf.dtype != jnp.float32:
            raise ConfigError(
                f"init makes {'/'.join(map(str, keys))} as {leaf.dtype}; parameters "
                f"are float32, whatever loss computes with"
            )
    try:
        plan_fragments(shapes, model.axes, 1)
    except ValueError as error:
        raise ConfigError(f"axes do not name those of init: {error}") from error
    if model.loss is None:
        return
    frozen = {} if model.frozen is None else model.frozen.shapes
    rows, length = island.batch_size // island.accumulation, run.sequence_length
    fields = model.fields(run.data.arrays)
    for taken in (fields, {**fields, "weights": WEIGHTS}):
        batch = abstract_batch(taken, rows, length)
        with jax.set_mesh(layout.mesh):
            result: Any = jax.eval_shape(model.require_loss(), shapes, batch, frozen)
        _check_loss(result, rows)


def _check_loss(result: Any, rows: int) -> None:
    try:
        loss, metrics = result
        scalars = {f"metrics[{n!r}]": metrics[n] for n in ("loss", "tokens")}
        told = {f"metrics[{n!r}]": metrics[n] for n in ROWS if n in metrics}
        found = {"the loss": loss, **scalars, **told}
        facts = [(name, v.shape, v.dtype) for name, v in found.items()]
    except (TypeError, ValueError, KeyError, AttributeError):
        raise ConfigError(
            f"loss returned {result}; it must return the mean loss and a dict of "
            f"'loss' and 'tokens', all of them scalars"
        ) from None
    for name, shape, dtype in facts:
        wanted: tuple[int, ...] = ()
        what = "be a float32 scalar, the mean over all weights of the batch"
        if name in told:
            wanted, what = (rows,), f"have one float32 for each of the {rows} rows"
        if shape != wanted or dtype != np.float32:
            raise ConfigError(
                f"loss returned {name} of shape {shape} and dtype {dtype}; it must "
                f"{what}"
            )
    if told and len(told) < len(ROWS):
        raise ConfigError(
            f"loss returned {next(iter(told))} without the other one of "
            f"{', '.join(ROWS)}; give both or none"
        )
