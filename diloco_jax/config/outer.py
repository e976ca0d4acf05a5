"""The outer optimizer, which applies a merged delta to the global parameters."""

from __future__ import annotations

import dataclasses

from diloco_jax.config.fields import BELOW_1, NOT_NEGATIVE, POSITIVE, setting

OPEN = ("optimizer", "learning_rate", "momentum")
"""Fields that may be left open; they are filled in when the run is created."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """The outer optimizer (docs/design/outer_presets.md).

    Example:
      >>> from diloco_jax import OuterConfig
      >>> OuterConfig(optimizer="sgd", learning_rate=1.0).momentum is None
      True
    """

    optimizer: str | None = setting(
        None,
        code=True,
        help='Outer optimizer: "sgd", "nesterov", the name of one in optax or '
        'optax.contrib, or your own as "path/to/file.py:function" '
        "(docs/extending.md); None = chosen when the run is created.",
    )
    learning_rate: float | None = setting(
        None,
        POSITIVE,
        help="Outer learning rate; None = chosen when the run is created.",
    )
    momentum: float | None = setting(
        None,
        BELOW_1,
        help='Momentum of "nesterov"; None = chosen when the run is created.',
    )
    warmup_merges: int = setting(
        0,
        NOT_NEGATIVE,
        help="Merges of a fragment over which the outer learning rate rises.",
    )
    norm_guard: float = setting(
        10.0,
        NOT_NEGATIVE,
        help="A merged delta longer than this many times the running mean is cut; "
        "0 = never.",
    )

    @property
    def is_open(self) -> bool:
        """Tell whether something is left to be filled in."""
        return any(getattr(self, name) is None for name in OPEN)

    def filled(self, chosen: OuterConfig) -> OuterConfig:
        """Fill the fields that this one leaves open from `chosen`."""
        missing = {
            name: getattr(chosen, name) for name in OPEN if getattr(self, name) is None
        }
        return dataclasses.replace(self, **missing)
