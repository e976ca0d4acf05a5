"""Adopt rules as books and boundaries see them."""

from __future__ import annotations

from diloco_jax.core.choices import AdoptRule
from diloco_jax.protocol.island.adopt_traits import AdoptTraits


def adopt_traits(rule: AdoptRule) -> AdoptTraits:
    """The facts about a rule."""
    return AdoptTraits(
        adopts_first=rule in ("keep", "rebase"),
        keeps_pending=rule == "keep",
        loses_steps=rule == "overwrite",
    )
