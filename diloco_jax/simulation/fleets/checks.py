"""Refusals of bad numbers of a simulation, each with a message that names them."""

from __future__ import annotations

from typing import Any

from diloco_jax.config import ConfigError
from diloco_jax.config.fields import LONGEST_S, Bound

MOST_EVENTS = 1e8
"""Events that a simulation may have: hours on one core."""
PARAMS = Bound(0, 1e15, above=True)
FRAGMENTS = Bound(1, 100_000)
GBIT_PER_S = Bound(1e-6, 1e6)
STEP_SECONDS = Bound(1e-6, LONGEST_S)


def cut_in_reach(config: Any) -> None:
    """Raise ConfigError if `params` cannot be cut into `fragments`."""
    if config.fragments > config.params:
        raise ConfigError(
            f"fragments = {config.fragments}, but params = {config.params:g}; lower "
            f"fragments"
        )


def in_reach(what: str, count: float, remedy: str) -> None:
    """Raise ConfigError if `count` is more than a simulation gets through."""
    if not count <= MOST_EVENTS:
        raise ConfigError(
            f"that is {count:.2g} {what} to simulate, more than {MOST_EVENTS:.0e}; "
            f"{remedy}"
        )


def steps_in_reach(hours: float, step_seconds: float, islands: int) -> None:
    """Raise ConfigError if the islands make too many steps in these hours."""
    steps = hours * 3600 / step_seconds * islands
    in_reach("steps of islands", steps, "lower hours, or raise step_seconds")


def deltas_in_reach(
    hours: float, step_seconds: float, islands: int, exchange: Any
) -> None:
    """Raise ConfigError if the protocol cannot get through the deltas of these hours.

    At every delta the protocol goes through its books of all fragments. exchange: a
    `fleet.ExchangeTerms`.
    """
    cycles = hours * 3600 / step_seconds / exchange.cycle
    deltas = cycles * islands * exchange.fragments
    in_reach(
        f"pairs of {deltas:.2g} deltas and fragments = {exchange.fragments}",
        deltas * exchange.fragments,
        "lower fragments or hours, or raise cycle or step_seconds",
    )


def islands_in_reach(islands: float, fields: str) -> None:
    """Raise ConfigError if the protocol cannot get through the deltas of these islands.

    At every delta the protocol goes through its books of all islands. fields: names of
    the fields that set the number of islands.
    """
    pairs = islands * islands
    in_reach(f"pairs of {islands:,.15g} islands", pairs, f"lower {fields}")
