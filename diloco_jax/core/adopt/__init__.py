"""Adopt rules: how an island takes over a published piece.

Each fragment on an island has a base: a take sets base = local, an adoption sets
base = anchor. The difference local - base since then is not in any delta yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.core.members import Family

if TYPE_CHECKING:
    from diloco_jax.core.adopt.rule import AdoptRule

RULES: Family[AdoptRule] = Family(
    kind="adopt rule",
    table={
        "keep": "diloco_jax.core.adopt.keep:KEEP",
        "rebase": "diloco_jax.core.adopt.rebase:REBASE",
        "overwrite": "diloco_jax.core.adopt.overwrite:OVERWRITE",
        "blend": "diloco_jax.core.adopt.blend:BLEND",
    },
    checker="diloco_jax.core.adopt.checking:check",
)
