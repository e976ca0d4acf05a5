"""The facts about an adopt rule that books and boundaries depend on."""

from __future__ import annotations

import msgspec


class AdoptTraits(msgspec.Struct, frozen=True, kw_only=True):
    """One rule's facts; the rule itself is mathematics (`core/adopt.py`)."""

    adopts_first: bool
    """True if a boundary with both adopts a fragment before taking it."""
    keeps_pending: bool
    """True if a version known to lack the last delta is adopted beside that delta."""
    loses_steps: bool
    """True if an adoption undoes the steps since the take."""
