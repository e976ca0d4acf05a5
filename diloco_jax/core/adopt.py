"""An island takes over a published piece.

Each fragment on an island has a base: a take sets base = local, an adoption sets
base = anchor. What `local` has moved away from its base since is not in any delta yet.

- `rebase`: anchor + (local - base): nothing is lost.
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
    if rule == "rebase":
        return anchor + (local - base)
    if rule == "overwrite":
        return anchor
    if rule == "blend":
        return alpha * local + (1 - alpha) * anchor
    raise ValueError(f"no adopt rule {rule!r}; choose 'rebase', 'overwrite' or 'blend'")
