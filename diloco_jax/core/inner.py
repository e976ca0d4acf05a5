"""The inner step of an island: optimizer, learning rate, losses by source of a mixture.

The optimizer is a member of `INNER_OPTIMIZERS`, most are optax's, at learning rate 1;
its updates are multiplied by the `learning_rate`, which follows the run. So
an optimizer fits if its learning rate is only a factor of its updates, and if an update
needs only gradients, state and parameters. `check_fit` tries both on small arrays.

Axis names decide which parameters decay and which Muon orthogonalises: a stack of
vectors is not a matrix, and a stack of matrices is as many matrices.

The learning rate follows the progress of the whole run. Progress (tokens of all islands
/ tokens of the run) is not a count of local steps, so a late or returned island is in
step with the others.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diloco_jax.core.families import INNER_OPTIMIZERS, InnerOptimizer
from diloco_jax.core.fragments import LAYERS, VOCAB
from diloco_jax.core.members import Family, suggest

Argument = bool | int | float | str
Make = Callable[[Mapping[str, Any], float], optax.GradientTransformation]
"""(axes, learning rate) -> the optimizer."""

RATE = "learning_rate"
OURS = {
    RATE: "inner.learning_rate",
    "b1": "inner.beta1",
    "b2": "inner.beta2",
    "mu_dtype": "inner.moment_dtype",
    "weight_decay": "inner.weight_decay",
    "weight_decay_rate": "inner.weight_decay",
    "mask": "the parameter's axes",
    "weight_decay_mask": "the parameter's axes",
}
"""Setting that gives the value, by the parameter of an optax function."""
MASKS = ("mask", "weight_decay_mask")
STACKS = (LAYERS, "expert")
"""Names of the axes that stack arrays, where they lead: layers, and experts in them."""

AXES = {"matrix": (LAYERS, "embed", "mlp"), "vector": ("embed",)}
SHAPES = {"matrix": (3, 4, 6), "vector": (4,)}
STEPS, SMALLER_RATE = 3, 0.25
RELATIVE, ABSOLUTE = 1e-2, 1e-4
"""Tolerances between two computations that differ only in rounding."""


def find_in_optax(
    name: str, family: Family[Any]
) -> Callable[..., optax.GradientTransformation]:
    """Return optax's function of that name; ValueError with the nearest name and a
    remedy if optax has none that takes a learning rate."""
    for module in (optax, optax.contrib):
        exported: Any = getattr(module, name, None)
        if _is_optimizer(name, exported):
            found: Callable[..., optax.GradientTransformation] = exported
            return found
    known = [
        other
        for module in (optax, optax.contrib)
        for other, value in vars(module).items()
        if _is_optimizer(other, value)
    ]
    raise ValueError(
        f"{name!r} is no optimizer of optax or optax.contrib{suggest(name, known)}; "
        f"choose {', '.join(family.table)}, or name your own as 'path/to/file.py:name',"
        f" or a function there that takes a {RATE}"
    )


def find_inner(name: str) -> InnerOptimizer:
    """Find an optimizer of optax; raise ValueError if it has none of that name."""
    return find_in_optax(name, INNER_OPTIMIZERS)


def settings_of(
    name: str, beta1: float, beta2: float, moment_dtype: str
) -> tuple[Callable[..., optax.GradientTransformation], dict[str, Any], str]:
    """Return the optimizer of this name, those of our settings that it takes, and the
    name of its mask of parameters that decay, if it applies the decay itself.

    Raises:
      ValueError: an unknown name, or a moment dtype that the optimizer cannot set.
    """
    try:
        function = INNER_OPTIMIZERS.find(name)
    except ValueError as error:
        raise ValueError(f"inner.optimizer = {name!r}: {error}") from None
    takes = inspect.signature(function).parameters
    if moment_dtype != "float32" and "mu_dtype" not in takes:
        others = [p for p in takes if "dtype" in p]
        raise ValueError(
            f"inner.moment_dtype = {moment_dtype!r}, but {_called(name)} takes no "
            f"mu_dtype; leave it at 'float32'"
            f"{f' (in inner.arguments it takes {others})' if others else ''}"
        )
    settings = {"b1": beta1, "b2": beta2, "mu_dtype": moment_dtype}
    own: dict[str, Any] = {n: v for n, v in settings.items() if n in takes}
    mask = next((p for p in MASKS if p in takes and "weight_decay" in takes), "")
    if "weight_decay" in takes and not mask:
        own["weight_decay"] = 0.0
    return function, own, mask


def call(
    name: str,
    function: Callable[..., optax.GradientTransformation],
    own: Mapping[str, Any],
    arguments: Mapping[str, Argument],
) -> optax.GradientTransformation:
    """Call function(**own, **arguments); ValueError if they do not fit together."""
    takes = inspect.signature(function).parameters
    for argument, value in arguments.items():
        said = OURS.get(argument, "another field" if argument in own else "")
        if said:
            raise ValueError(
                f"inner.arguments has {argument} = {value!r}, but {said} says that of "
                f"{name!r}; leave it out of inner.arguments"
            )
        if argument not in takes:
            raise ValueError(
                f"inner.arguments has {argument} = {value!r}, which {_called(name)} "
                f"does not take{suggest(argument, takes)}; it takes "
                f"{', '.join(p for p in takes if p not in OURS)}"
            )
    missing = [
        p.name
        for p in takes.values()
        if p.default is p.empty and p.name not in own and p.name not in arguments
    ]
    if missing:
        raise ValueError(
            f"inner.optimizer = {name!r} needs {', '.join(missing)}; give it as "
            f"inner.arguments, or choose another optimizer if no number, string or "
            f"bool will do"
        )
    try:
        return function(**own, **arguments)
    except Exception as error:
        raise _refused(name, arguments, error) from error


def check_fit(name: str, arguments: Mapping[str, Argument], make: Make) -> None:
    """Raise ValueError if the optimizer does not fit; the module's docstring says when
    it does.
    """
    try:
        scaled = try_steps(make(AXES, 1.0), SMALLER_RATE)
        itself = try_steps(make(AXES, SMALLER_RATE), 1.0)
    except Exception as error:
        raise _refused(name, arguments, error) from error
    for leaf, expected in zip(scaled, itself, strict=True):
        if not np.allclose(leaf, expected, rtol=RELATIVE, atol=ABSOLUTE):
            raise ValueError(
                f"inner.optimizer = {name!r}: for {_called(name)} the learning rate is "
                f"more than a factor of the updates, so it cannot follow the progress "
                f"of the run from outside; choose another optimizer"
            )


def try_steps(optimizer: optax.GradientTransformation, scale: float) -> list[Any]:
    """Return small parameters after some steps."""
    rng = np.random.default_rng(0)

    def draw(*steps: int) -> dict[str, Any]:
        return {
            name: rng.standard_normal((*steps, *shape), np.float32)
            for name, shape in SHAPES.items()
        }

    def step(carry: Any, gradients: Any) -> tuple[Any, None]:
        params, state = carry
        updates, state = optimizer.update(gradients, state, params)
        updates = jax.tree.map(lambda u: scale * u, updates)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def train(params: Any, gradients: Any) -> Any:
        carry = params, optimizer.init(params)
        return jax.lax.scan(step, carry, gradients)[0][0]

    ended: list[Any] = jax.tree.leaves(train(draw(), draw(STEPS)))
    return ended


def _is_optimizer(name: str, function: Any) -> bool:
    is_function = isinstance(function, (types.FunctionType, functools.partial))
    if name.startswith(("_", "scale_by_")) or not is_function:
        return False
    return RATE in inspect.signature(function).parameters


def _called(name: str) -> str:
    if ":" in name:
        return name.rpartition(":")[2]
    return f"optax.{name}" if hasattr(optax, name) else f"optax.contrib.{name}"


def _refused(
    name: str, arguments: Mapping[str, Argument], error: Exception
) -> ValueError:
    return ValueError(
        f"inner.optimizer = {name!r} with inner.arguments = {dict(arguments)}: "
        f"{_called(name)} makes no updates from gradients, state and parameters "
        f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''});"
        f" correct inner.arguments, or choose another optimizer"
    )


def make_inner(
    name: str,
    *,
    axes: Mapping[str, Any],
    arguments: Sequence[tuple[str, Argument]] = (),
    beta1: float = 0.9,
    beta2: float = 0.95,
    moment_dtype: str = "float32",
    weight_decay: float = 0.0,
    clip_norm: float = 0.0,
) -> optax.GradientTransformation:
    """Make the optimizer at learning rate 1; scale its updates by a rate.

    Args:
      name: a member of the family. Those of its table fit if they get no arguments.
        "sgd" ignores the betas. "muon" orthogonalises the matrices (two axes after
        those of STACKS, none of them "vocab"), each of a stack for itself, with
        momentum beta1; all else goes through Adam with Nesterov momentum. Anything that
        optax computes per tensor, such as a trust ratio, is per stack.
      axes: nested like the parameters; leaves are tuples of logical axis names.
      arguments: further arguments of optax's function.
      moment_dtype: dtype of the first moment, or of Muon's momentum.
      weight_decay: decay of parameters with at least two axes after those of STACKS.
      clip_norm: longest global gradient norm; 0 = any.

    Raises:
      ValueError: unknown name or argument, or an optimizer that does not fit.
    """
    more, mask = dict(arguments), ""
    function: Callable[..., optax.GradientTransformation] = optax.sgd
    own: dict[str, Any] = {}
    if name == "muon":
        # 0.2 scales Muon's updates to the size of AdamW's, so that one learning rate
        # serves both (arXiv 2502.16982).
        betas = {"beta": beta1, "adam_b1": beta1, "adam_b2": beta2}
        own = {**betas, "mu_dtype": moment_dtype, "consistent_rms": 0.2}
        function = optax.contrib.muon
    elif name != "sgd":
        function, own, mask = settings_of(name, beta1, beta2, moment_dtype)

    def make(axes: Mapping[str, Any], rate: float) -> optax.GradientTransformation:
        decays = _map_axes(lambda names: len(_matrix_axes(names)) >= 2, axes)
        given = {RATE: rate, **own}
        if name == "muon":
            numbers = _map_axes(_muon_numbers, axes)
            given["muon_weight_dimension_numbers"] = numbers
        if mask:
            given |= {"weight_decay": weight_decay, mask: decays}
            return call(name, function, given, more)
        optimizer = call(name, function, given, more)
        if name == "sgd":
            decay = optax.add_decayed_weights(weight_decay, decays)
            return optax.chain(decay, optimizer)
        # Added to the updates, as in AdamW: Muon's own decay takes no mask, either.
        decay = optax.add_decayed_weights(-rate * weight_decay, decays)
        return optax.chain(optimizer, decay)

    optimizer = make(axes, 1.0)
    if more or name not in INNER_OPTIMIZERS.table:
        check_fit(name, more, make)
    if clip_norm:
        return optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)
    return optimizer


def left_to_adam(axes: Mapping[str, Any]) -> list[str]:
    """Return the names of arrays that decay and that Muon leaves to Adam."""
    return [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, names in jax.tree_util.tree_leaves_with_path(
            axes, is_leaf=lambda x: isinstance(x, tuple)
        )
        if len(_matrix_axes(names)) >= 2 and not _muon_numbers(names)
    ]


def _map_axes(function: Any, axes: Mapping[str, Any]) -> Any:
    return jax.tree.map(function, axes, is_leaf=lambda x: isinstance(x, tuple))


def _matrix_axes(names: tuple[str | None, ...]) -> tuple[int, ...]:
    first = next((i for i, name in enumerate(names) if name not in STACKS), len(names))
    return tuple(range(first, len(names)))


def _muon_numbers(
    names: tuple[str | None, ...],
) -> optax.contrib.MuonDimensionNumbers | None:
    matrix = _matrix_axes(names)
    if len(matrix) != 2 or VOCAB in names:
        return None
    return optax.contrib.MuonDimensionNumbers(*matrix)


def by_source(
    sources: jax.Array, losses: jax.Array, tokens: jax.Array, count: int
) -> jax.Array:
    """Return the sums of losses and of tokens of each source's rows, f32 [S, 2].

    Args:
      sources: number of each row's source, int32 [B].
      losses: weighted sum of the losses of each row in nats, f32 [B].
      tokens: sum of the weights of each row, f32 [B].
      count: S.
    """
    rows = jnp.stack((losses, tokens), axis=1)
    # A product of matrices would round to bf16 on a TPU.
    own = sources[:, None] == jnp.arange(count)[None]
    return jnp.sum(jnp.where(own[..., None], rows[:, None, :], 0.0), axis=0)


def learning_rate(settings: Any, progress: float, rewarm: float = 1.0) -> float:
    """Return the rate at a point of the run: linear from 0, then by the schedule.

    Args:
      settings: an `InnerConfig`: learning_rate after the warm-up over warmup_fraction
        of the run; schedule "cosine" ends at final_fraction of it, "constant" stays.
      progress: share of the run that is done; clipped to [0, 1].
      rewarm: share in [0, 1] that an island with fresh moments may use.

    Raises:
      ValueError: unknown schedule.
    """
    progress = min(max(progress, 0.0), 1.0)
    warmup, final = settings.warmup_fraction, settings.final_fraction
    peak: float = settings.learning_rate
    share: float
    if progress < warmup:
        share = progress / warmup
    elif settings.schedule == "constant":
        share = 1.0
    elif settings.schedule == "cosine":
        done = (progress - warmup) / max(1 - warmup, 1e-9)
        share = final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
    else:
        raise ValueError(
            f"inner.schedule = {settings.schedule!r}; choose 'cosine' or 'constant'"
        )
    return peak * share * min(max(rewarm, 0.0), 1.0)
