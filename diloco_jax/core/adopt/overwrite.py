"""The adopt rule "overwrite": the anchor. Steps since the take are lost (Decoupled
DiLoCo, arXiv 2604.21428)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.core.adopt.rule import AdoptRule

if TYPE_CHECKING:
    import jax

    from diloco_jax.core.adopt.rule import Alpha


class Overwrite(AdoptRule):
    """See `AdoptRule`."""

    adopts_first = False
    loses_steps = True

    def adopt(
        self, local: jax.Array, base: jax.Array, anchor: jax.Array, alpha: Alpha
    ) -> jax.Array:
        """Return the anchor."""
        return anchor


OVERWRITE = Overwrite()
