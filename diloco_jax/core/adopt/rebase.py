"""The adopt rule "rebase": anchor + (local - base), so no step is lost by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.core.adopt.rule import AdoptRule, moved

if TYPE_CHECKING:
    import jax

    from diloco_jax.core.adopt.rule import Alpha


class Rebase(AdoptRule):
    """See `AdoptRule`."""

    def adopt(
        self, local: jax.Array, base: jax.Array, anchor: jax.Array, alpha: Alpha
    ) -> jax.Array:
        """The anchor, and what the island has done since."""
        return moved(local, base, anchor)


REBASE = Rebase()
