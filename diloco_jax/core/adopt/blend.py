"""The adopt rule "blend": alpha * local + (1 - alpha) * anchor (Streaming DiLoCo,
arXiv 2501.18512). Steps since the take count in the next delta."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.core.adopt.rule import AdoptRule

if TYPE_CHECKING:
    import jax

    from diloco_jax.core.adopt.rule import Alpha


class Blend(AdoptRule):
    """See `AdoptRule`."""

    adopts_first = False

    def adopt(
        self, local: jax.Array, base: jax.Array, anchor: jax.Array, alpha: Alpha
    ) -> jax.Array:
        """Return a weighted mean of both."""
        return alpha * local + (1 - alpha) * anchor


BLEND = Blend()
