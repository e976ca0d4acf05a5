"""Data that incarnations were granted, as the state holds it."""

from __future__ import annotations

import msgspec

from diloco_jax.protocol.values import Span

FIRST_LEASE_STEPS = 64
"""Steps for which data is granted before an island's speed is known."""
GRANTS_AT_ONCE = 4.0
"""Largest grants that an island may be given in a moment."""


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Positions granted to an incarnation; `offset` sequences were granted before."""

    offset: int
    span: Span


class Departed(msgspec.Struct, frozen=True, kw_only=True):
    """An ended incarnation with a delta that may still be merged. Its leases are those
    of the steps that are in no other merge."""

    island: str
    incarnation: int
    sequences_per_step: int
    leases: tuple[Lease, ...]
    in_merges: tuple[Span, ...]
