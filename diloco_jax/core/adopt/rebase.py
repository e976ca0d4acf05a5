"""The adopt rule "rebase": anchor + (local - base), which loses no step."""

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
        """Return the anchor plus the island's change since its base."""
        return moved(local, base, anchor)


REBASE = Rebase()
