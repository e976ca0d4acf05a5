"""The inner optimizer of a run's model."""

from __future__ import annotations

import optax

from diloco_jax.config import ConfigError, RunConfig
from diloco_jax.core.inner import make_inner
from diloco_jax.models.model import Model


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
