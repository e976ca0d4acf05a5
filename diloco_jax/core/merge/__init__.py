"""Merge rules: ways to combine the deltas of several islands into one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.core.members import Family

if TYPE_CHECKING:
    from diloco_jax.core.merge.rule import MergeRule

RULES: Family[MergeRule] = Family(
    kind="merge rule",
    table={
        "rda": "diloco_jax.core.merge.rda:RDA",
        "mean": "diloco_jax.core.merge.mean:MEAN",
        "clipped_mean": "diloco_jax.core.merge.clipped_mean:CLIPPED_MEAN",
        "trimmed_mean": "diloco_jax.core.merge.trimmed_mean:TRIMMED_MEAN",
    },
    checker="diloco_jax.core.merge.checking:check",
)
