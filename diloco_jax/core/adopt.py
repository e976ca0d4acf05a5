"""An island takes over a published piece.

Each fragment on an island has a base: a take sets base = local, an adoption sets
base = anchor. What `local` has moved away from its base since is not in any delta yet.

- `rebase`: anchor + (local - base): no step is lost by it.
- `keep`: as `rebase`; but a version that the island's last delta is known not to be in
  moves local and base alike (`moved`). So the island trains on from its own delta, too,
  until a version has it.
- `overwrite`: anchor: steps since the take are lost (Decoupled DiLoCo, arXiv
  2604.21428).
- `blend`: alpha * local + (1 - alpha) * anchor (Streaming DiLoCo, arXiv 2501.18512).
"""

from __future__ import annotations

import functools

import jax

from diloco_jax.core.choices import AdoptRule


@functools.partial(jax.jit, static_argnums=0)
def adopt(
    rule: AdoptRule,
    local: jax.Array,
    base: jax.Array,
    anchor: jax.Array,
    alpha: jax.Array | float,
) -> jax.Array:
    """The piece's new local values, f32[shape]. Nothing is donated.

    Args:
      rule: static.
      local: the island's values now.
      base: its values at its last take, or the anchor it adopted since.
      anchor: the version to adopt.
      alpha: share of the local values that `blend` keeps; other rules ignore it.

    Raises:
      ValueError: unknown rule.
    """
    if rule in ("rebase", "keep"):
        return moved(local, base, anchor)
    if rule == "overwrite":
        return anchor
    if rule == "blend":
        return alpha * local + (1 - alpha) * anchor
    raise ValueError(
        f"no adopt rule {rule!r}; choose 'keep', 'rebase', 'overwrite', 'blend'"
    )


def moved(value: jax.Array, before: jax.Array, anchor: jax.Array) -> jax.Array:
    """anchor + (value - before), f32[shape]: as far from the new anchor as it was from
    the one before. Nothing is donated."""
    return anchor + (value - before)
