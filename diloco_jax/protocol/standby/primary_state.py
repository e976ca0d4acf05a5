"""The state of a coordinator that leads, or wants to, where a standby may follow."""

from __future__ import annotations

import math

import msgspec

from diloco_jax.protocol.standby.machines import PrimaryState
from diloco_jax.protocol.standby.mandate import NO_GENERATION, Mandate, MandateTiming


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the object that is under way. mandate: what is written, None if it
    is a read."""

    at: float
    mandate: Mandate | None = None


class Primary(msgspec.Struct, frozen=True, kw_only=True):
    """State of the primary."""

    timing: MandateTiming
    node: str
    run_id: str
    life: str
    """Tells this process from others of the same node: what it writes has it."""
    copied: str = ""
    """Why its disk is a copy of that of the node of this name; empty if it is not."""
    phase: PrimaryState = "seeking"
    standby: str = ""
    """The node that follows, or is being parted from."""
    generation: str = NO_GENERATION
    reign: int = 1
    gathers: bool = False
    finished: bool = False
    """The run is over, and the mandate is to say so from now on."""
    cedes: bool = False
    """The mandate is to say that the standby may take it at once."""
    told_over: bool = False
    """The mandate says so."""
    valid_until: float = -math.inf
    lapsed: bool = False
    """It has run out since it was renewed last."""
    request: Request | None = None
    next_at: float = -math.inf
    """Time of the next request."""
    write_next: bool = False
    """The next request is a write: the generation is known."""
    written: int = 0
    """Number of the last record."""
    answered: int = 0
    """Up to which the standby has them."""
    visible: int = 0
    """Up to which they may be seen; -1 if what was there before them may not."""
    heard_at: float = -math.inf
    """When the standby gave the last sign of life."""
    behind_since: float = math.inf
    """Since when the oldest record has waited for the standby."""
