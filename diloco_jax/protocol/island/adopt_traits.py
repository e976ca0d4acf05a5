"""The facts about an adopt rule that books and boundaries go by."""

from __future__ import annotations

import msgspec


class AdoptTraits(msgspec.Struct, frozen=True, kw_only=True):
    """One rule's facts; the rule itself is mathematics (`core/adopt.py`)."""

    adopts_first: bool
    """A boundary that has both adopts a fragment before it takes it."""
    keeps_pending: bool
    """A version that the last delta is known not to be in is adopted beside it."""
    loses_steps: bool
    """An adoption undoes the steps since the take."""
