"""Parts of a world of two coordinators: nodes, lines, mistakes made on purpose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from diloco_jax.protocol.standby import following, primary
from diloco_jax.protocol.standby.mandate import MandateTiming

TIMING = MandateTiming(valid_s=10.0, renew_s=2.0, patience_s=2.0)


class BrokenError(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A mistake that is made on purpose."""

    generations: bool = True
    """Writes are refused at another generation than they name."""
    answers_ahead: int = 0
    """Records by which the standby's answers are too high."""
    notices_loss: bool = True
    """A node knows that its disk is lost."""
    notices_full: bool = True
    """A standby answers for nothing that found no room."""
    primary: MandateTiming = TIMING
    standby: MandateTiming = TIMING


@dataclass
class Line:
    """One connection from a standby to a primary; messages keep their order."""

    ends: tuple[str, str]
    open: bool = True
    last: dict[str, float] = field(default_factory=dict)


@dataclass
class Node:
    """A coordinator: its machine, if it is up, and its disk."""

    name: str
    rate: float
    """Seconds of its clock per second."""
    machine: primary.Primary | following.Standby | None = None
    disk: list[int] = field(default_factory=list)
    empty: bool = True
    """The disk holds no run."""
    lost: bool = False
    """It was lost, and no copy came since: what the mandate says of it is not true."""
    full: bool = False
    first: int = 0
    """Records on the disk as this life began: its record number n lies at first + n."""
    life: int = 0
    paused_until: float = 0.0
    inbox: list[tuple[int, Any]] = field(default_factory=list)
    line: Line | None = None
    has_state: bool = False
    """It has loaded or gathered its state."""
