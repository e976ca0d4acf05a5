"""The inner optimizer, which trains an island between merges."""

from __future__ import annotations

import dataclasses
from typing import Literal

from diloco_jax.config.fields import BELOW_1, NOT_NEGATIVE, SHARE, setting

Schedule = Literal["cosine", "constant"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class InnerConfig:
    """The inner optimizer; its learning rate follows the progress of the run.

    Example:
      >>> from diloco_jax import Config
      >>> Config().replace("inner.learning_rate", -1.0)
      Traceback (most recent call last):
          ...
      diloco_jax.errors.ConfigError: inner.learning_rate = -1.0; it must be at least 0
    """

    optimizer: str = setting(
        "adamw",
        help='"adamw", "lion", "sgd", "muon", or another one by its name in optax or '
        "optax.contrib.",
    )
    arguments: tuple[tuple[str, bool | int | float | str], ...] = setting(
        (),
        metavar="[NAME VALUE ...]",
        help="Further arguments of that optax function: pairs of name and value; in a "
        "configs file also a mapping.",
    )
    learning_rate: float = setting(1e-3, NOT_NEGATIVE, help="Peak learning rate.")
    schedule: Schedule = setting(
        "cosine", help="Course of the learning rate after the warm-up."
    )
    warmup_fraction: float = setting(
        0.05,
        SHARE,
        help="Share of the run's progress over which the learning rate rises from 0.",
    )
    final_fraction: float = setting(
        0.1, SHARE, help="Learning rate at the end, as a share of the peak."
    )
    rewarm_steps: int = setting(
        10,
        NOT_NEGATIVE,
        help="Steps over which a fresh or returned island's learning rate rises.",
    )
    beta1: float = setting(
        0.9,
        BELOW_1,
        help="b1 of every optax function that takes one; the momentum of Muon.",
    )
    beta2: float = setting(
        0.95, BELOW_1, help="b2 of every optax function that takes one."
    )
    moment_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        help='Type of the first moment. optax keeps second moments in float32; "sgd" '
        "has no moments.",
    )
    weight_decay: float = setting(
        0.1,
        NOT_NEGATIVE,
        help="Decay of parameters with at least two axes, times the learning rate.",
    )
    clip_norm: float = setting(
        1.0,
        NOT_NEGATIVE,
        help="Global gradient norm above which gradients are scaled down; 0 = never.",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(dict(self.arguments).items()))
