"""Bad numbers of a simulation, refused with a message that names them."""

from __future__ import annotations

import math
from typing import Any

from diloco_jax.config import ConfigError
from diloco_jax.validation import Bound


def within(config: Any, bound: Bound, *fields: str) -> None:
    """Raises ConfigError unless all are in these bounds."""
    for field in fields:
        if not bound.holds(value := getattr(config, field)):
            raise ConfigError(f"{field} = {value}; it must be {bound}")


def not_negative(config: Any, *fields: str) -> None:
    """Raises ConfigError unless all are finite and at least 0."""
    for field in fields:
        if not 0 <= getattr(config, field) < math.inf:
            raise ConfigError(
                f"{field} = {getattr(config, field)}; it must be finite and at least 0"
            )


def positive(config: Any, *fields: str) -> None:
    """Raises ConfigError unless all are finite and above 0."""
    for field in fields:
        if not 0 < getattr(config, field) < math.inf:
            raise ConfigError(
                f"{field} = {getattr(config, field)}; it must be finite and above 0"
            )


def at_least_one(config: Any, *fields: str) -> None:
    """Raises ConfigError unless all are 1 or more."""
    for field in fields:
        if getattr(config, field) < 1:
            raise ConfigError(
                f"{field} = {getattr(config, field)}; it must be at least 1"
            )
