"""An island's first message on every connection."""

from __future__ import annotations

from typing import Any

import msgspec

from diloco_jax.protocol.island.status import Status
from diloco_jax.protocol.messages import Hello


class Introduction(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a hello that is constant during an incarnation; see `Hello` for its
    fields."""

    island: str
    incarnation: int
    session: str
    fingerprint: str
    tokens_per_step: int
    sequences_per_step: int
    lead: int = 0
    plan: str = ""
    run: dict[str, Any] = msgspec.field(default_factory=dict)
    island_config: dict[str, Any] = msgspec.field(default_factory=dict)
    environment: dict[str, Any] = msgspec.field(default_factory=dict)


def hello(who: Introduction, status: Status) -> Hello:
    """Return the hello of an incarnation with this status."""
    return Hello(
        island=who.island,
        incarnation=who.incarnation,
        session=who.session,
        fingerprint=who.fingerprint,
        tokens_per_step=who.tokens_per_step,
        sequences_per_step=who.sequences_per_step,
        lead=who.lead,
        plan=who.plan,
        run=who.run,
        island_config=who.island_config,
        environment=who.environment,
        run_id=status.run_id,
        phase=status.phase,
        steps=status.steps,
        step_seconds=status.measures.median_step_seconds,
        outstanding=status.outstanding,
        sequences_granted=status.sequences_granted,
        records_through=status.records_through,
        term=status.term,
        versions=status.versions,
        tokens=status.tokens,
        next_position=status.next_position,
    )
