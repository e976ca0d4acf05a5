"""Codecs: how f32 arrays are written as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from diloco_jax.core.members import Family

if TYPE_CHECKING:
    from diloco_jax.core.codecs.codec import TileCodec

CODECS: Family[TileCodec] = Family(
    kind="codec",
    table={
        "f32": "diloco_jax.core.codecs.f32:F32",
        "bf16": "diloco_jax.core.codecs.bf16:BF16",
        "int8": "diloco_jax.core.codecs.int8:INT8",
        "int4": "diloco_jax.core.codecs.int4:INT4",
    },
    checker="diloco_jax.core.codecs.checking:check",
)
