"""Bad numbers of a simulation, refused with a message that names them."""

from __future__ import annotations

import math
from typing import Any

from diloco_jax.config import ConfigError
from diloco_jax.validation import Bound

MOST_EVENTS = 1e8
"""That a simulation may have: hours on one core."""
PARAMS = Bound(0, 1e15, above=True)
FRAGMENTS = Bound(1, 100_000)
GBIT_PER_S = Bound(1e-6, 1e6)


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


def in_reach(what: str, count: float, remedy: str) -> None:
    """Raises ConfigError if there is more of it than a simulation gets through."""
    if not count <= MOST_EVENTS:
        raise ConfigError(
            f"that is {count:.2g} {what} to simulate, more than {MOST_EVENTS:.0e}; "
            f"{remedy}"
        )


def steps_in_reach(hours: float, step_seconds: float, islands: int) -> None:
    """Raises ConfigError if islands make more steps in these hours than a simulation
    gets through."""
    steps = hours * 3600 / step_seconds * islands
    in_reach("steps of islands", steps, "lower hours, or raise step_seconds")


def at_least_one(config: Any, *fields: str) -> None:
    """Raises ConfigError unless all are 1 or more."""
    for field in fields:
        if getattr(config, field) < 1:
            raise ConfigError(
                f"{field} = {getattr(config, field)}; it must be at least 1"
            )
