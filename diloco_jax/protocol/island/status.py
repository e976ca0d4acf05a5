"""The value from which an island's hello and its reports are made."""

from __future__ import annotations

import msgspec

from diloco_jax.protocol.messages import Measures
from diloco_jax.protocol.values import Outstanding, Phase, Version


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Status of an incarnation. The loop posts the first fields; the conversation with
    the coordinator adds the others."""

    phase: Phase = "joining"
    steps: int = 0
    outstanding: tuple[Outstanding, ...] = ()
    versions: tuple[Version, ...] = ()
    """Versions of the anchors, current or about to be adopted."""
    measures: Measures = Measures()

    run_id: str = ""
    """The island's run, known from its first welcome on."""
    term: int = 0
    """Newest term in which this process was welcomed; 0: none yet."""
    sequences_granted: int = 0
    records_through: int = 0
    """Number of the last acknowledged record."""
    tokens: int = 0
    """Progress of the run in tokens, as last heard."""
    next_position: int = 0
    """Position below which data was granted to any island, as last heard."""
