"""An island takes over a published piece, by a rule of the family."""

from __future__ import annotations

import functools

import jax

from diloco_jax.core.adopt.rule import AdoptRule


@functools.partial(jax.jit, static_argnums=0)
def adopt(
    rule: AdoptRule,
    local: jax.Array,
    base: jax.Array,
    anchor: jax.Array,
    alpha: jax.Array | float,
) -> jax.Array:
    """Return the piece's new local values, f32[shape]: see `AdoptRule.adopt`. `rule` is
    static; nothing is donated."""
    return rule.adopt(local, base, anchor, alpha)
