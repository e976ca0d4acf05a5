"""Facts about adopt rules, as books and boundaries see them."""

from __future__ import annotations

from diloco_jax.core.adopt import RULES
from diloco_jax.protocol.island.adopt_traits import AdoptTraits


def adopt_traits(name: str) -> AdoptTraits:
    """Return the facts about the adopt rule of that name."""
    rule = RULES.find(name)
    return AdoptTraits(
        adopts_first=rule.adopts_first,
        keeps_pending=rule.keeps_pending,
        loses_steps=rule.loses_steps,
    )
