"""The mandate: a small object outside of both coordinators that says which one leads.

A primary and a standby cannot tell each other's death from a partition, so a third
party decides. The object has a *generation*, which changes with every write, and a
write names the generation that it replaces. Whoever holds the mandate renews it. Who
has seen one generation unchanged for longer than it is valid may replace it.
"""

from __future__ import annotations

import msgspec

NO_GENERATION = ""
"""The generation of an object that does not exist."""


class Mandate(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the object. A node is a coordinator with a workdir of its own."""

    run_id: str
    holder: str
    """The node that leads."""
    reign: int = 1
    """Rises with every take-over: by one, unless the holder has led in a later one,
    before the object was made anew."""
    in_step: str = ""
    """The node whose disk has everything that anyone has seen of this reign; empty if
    there is none."""
    gathers: bool = False
    """The holder has no state of its own that counts: it asks the islands for it."""
    over: bool = False
    """The run is over."""
    ceded: bool = False
    """The holder's disk is broken, and it leads no more: the node in step may take the
    mandate at once."""
    life: str = ""
    """The holder's process that leads; empty until it has said so."""


class MandateTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by which both sides act; they follow from the time budget."""

    valid_s: float
    """Validity of the mandate, counted by its holder from the moment at which it asked
    for the last renewal that was confirmed."""
    renew_s: float
    """Interval of renewals, and of looks at the object."""
    patience_s: float
    """Longest silence between the primary and its standby."""
    drift: float = 0.05
    """How much faster the standby's clock may go than the primary's."""

    @property
    def stall_s(self) -> float:
        """Longest time for which a record waits for the standby's answer. A publish
        that goes ahead of it may take a while."""
        return self.valid_s / 2

    @property
    def expiry_s(self) -> float:
        """Seconds without a change after which the standby counts it as expired."""
        return self.valid_s * (1 + self.drift)

    @property
    def gathering_s(self) -> float:
        """Seconds without a change after which a standby that is not in step takes
        over. A primary that only starts again comes back before that."""
        return self.expiry_s + self.valid_s
